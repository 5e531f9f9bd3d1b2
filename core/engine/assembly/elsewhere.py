"""A plan that was made on another machine, on this one."""

from __future__ import annotations

from dataclasses import replace

from engine.assembly.bind import ENGINE_SLOTS
from engine.assembly.choosing import ARCHITECTURE, offer_reasons
from engine.assembly.device_facts import device_facts
from engine.assembly.discovery import discover
from engine.assembly.errors import AssemblyError
from engine.assembly.execution import CAPTURABLE, reasons_against
from engine.assembly.plan import EnginePlan


def on_this_machine(plan: EnginePlan, threads: int) -> EnginePlan:
    """The plan for an engine that runs here, alone as far as it knows: with the device that is here, and so many
    threads for each rank. Raises :class:`AssemblyError` with all that cannot run on it."""
    device, discovered = device_facts(plan.device.kind), discover(plan.settings.plugins)
    problems: list[str] = []
    unused = {ARCHITECTURE, *(["communicator"] if plan.layout.size == 1 else [])}  # the model is described already
    for choice in (choice for slot in ENGINE_SLOTS if slot not in unused for choice in plan.slots[slot]):
        dist = choice.origin.rpartition(" ")[0]
        offers = discovered.named(choice.slot, f"{dist}:{choice.name}")
        asked = f"{choice.slot}={choice.name} cannot serve {plan.model.name} on {device.name or device.kind}"
        problems += [f"{asked}: {why}" for offer in offers for why in offer_reasons(offer, plan.model, device)]
    kernel = plan.choice("attention_kernel")
    can_capture = any(CAPTURABLE in o.provider.provides for o in discovered.named(kernel.slot, kernel.name))
    against = reasons_against(plan.execution, device, plan.dtype, kernel.name, can_capture)
    problems += [f"execution={plan.execution}: {why}" for why in against]
    if problems:
        raise AssemblyError(problems)
    return replace(plan, device=device, settings=replace(plan.settings, threads=threads))
