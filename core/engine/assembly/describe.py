"""The plan as one table, printed at start-up."""

from __future__ import annotations

import io
from collections.abc import Iterable

from engine.assembly.choosing import ARCHITECTURE
from engine.assembly.plan import EnginePlan, SlotChoice
from engine.assembly.threads import cores_of
from engine.contracts.slots import SLOTS


def describe(plan: EnginePlan, *, width: int = 110, color: bool = False) -> str:
    """A plan as text for a terminal ``width`` characters wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=_title(plan), title_justify="left", pad_edge=False)
    table.add_column("slot", no_wrap=True)
    table.add_column("plugin", no_wrap=True)
    table.add_column("settings", overflow="fold")
    table.add_column("from", no_wrap=True)
    for slot in SLOTS:
        for choice in plan.slots[slot]:
            table.add_row(slot, choice.name + _requested(choice), _settings(choice), choice.origin)
        if not plan.slots[slot]:
            table.add_row(slot, "-", "", "")
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(table)
    if line := fleet(plan):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for line in notes(plan):
        console.print(f"note: {line}", soft_wrap=True, markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def notes(plan: EnginePlan) -> tuple[str, ...]:
    """What the user should know: the plan's notes and what ``auto`` passed over."""
    # Which architecture computes a checkpoint follows from its name: the others are no news.
    asked = (choice for choice in _choices(plan) if choice.slot != ARCHITECTURE)
    passed = (f"{choice.slot}=auto passed over {line}" for choice in asked for line in choice.passed_over)
    return (*passed, *plan.notes)


def fleet(plan: EnginePlan) -> str:
    """How many engines there are, and what each has of the machine; empty for one."""
    replicas, ranks = plan.settings.fleet.replicas, plan.ranks_per_node
    if replicas == 1 and plan.launcher is None:
        return ""
    least = plan.settings.fleet.autoscale.min
    many = f"{replicas}" if plan.settings.fleet.autoscale.max is None else f"{least} to {replicas}"
    prefill = plan.settings.fleet.prefill
    prompts = f" ({prefill} for prompts)" if prefill else ""
    said = f"fleet: {many} engine{'s' * (many != '1')}{prompts}, each with "
    if plan.launcher is not None:
        return f"{said}{_of_machine(plan)} of a machine that fleet.launcher={plan.launcher.name} finds"
    if plan.device.kind == "cuda":
        gpus = min(ranks, plan.device.count)
        said += f"{gpus} GPU{'s' * (gpus > 1)}"
        shared = plan.ranks_per_device
        return said + (" of its own" if shared == 1 else f", which {shared} ranks share")
    threads = cores_of(plan)
    several = f"{ranks} ranks of " if ranks > 1 else ""
    return (
        f"{said}{several}{threads} CPU thread{'s' * (threads > 1)} and 1/{replicas} of the memory that is free at start"
    )


def _of_machine(plan: EnginePlan) -> str:
    """What an engine takes of a machine that is not known yet."""
    ranks, threads = plan.ranks_per_node, cores_of(plan)
    if plan.device.kind == "cuda":
        return f"{ranks} GPU{'s' * (ranks > 1)}"
    return f"{ranks} ranks of " * (ranks > 1) + f"{threads} CPU thread{'s' * (threads > 1)}"


def _title(plan: EnginePlan) -> str:
    device = plan.device.kind + (f" ({plan.device.name})" if plan.device.name else "")
    overlap = "overlap on" if plan.overlap else "overlap off"
    return (
        f"engine {plan.engine_version}: {plan.model.name} ({plan.model.architecture}, {plan.model.num_layers} layers) "
        f"in {plan.dtype} on {device}, {plan.execution}, {overlap}, up to {plan.max_len} tokens"
    )


def _choices(plan: EnginePlan) -> Iterable[SlotChoice]:
    return (choice for slot in SLOTS for choice in plan.slots[slot])


def _requested(choice: SlotChoice) -> str:
    return "" if choice.requested in ("", choice.name) else f" ({choice.requested})"


def _settings(choice: SlotChoice) -> str:
    return " ".join(f"{key}={value}" for key, value in choice.config.items())
