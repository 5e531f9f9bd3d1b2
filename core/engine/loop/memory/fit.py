"""Refuse early what cannot fit, and size the KV pool of what does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.execution.checkpoint import open_checkpoint
from engine.loop.memory.judge import Judge
from engine.loop.memory.needs import Needs
from engine.loop.memory.room import DoesNotFit, Room, free_memory
from engine.loop.memory.text import size

if TYPE_CHECKING:
    from engine.assembly.discovery import Discovered
    from engine.loop.memory.remedies import Remedy

FEWEST_BLOCKS = 3
"""The padding block, and two that a request can use."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An estimate that fits."""

    plan: EnginePlan
    needs: Needs
    room: Room


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of an engine."""

    blocks: int
    """The padding block included."""
    max_len: int
    """Most tokens of one request that it holds, at most ``model.max_len``."""
    notes: tuple[str, ...]
    """What the user should know about it."""


def plan_memory(
    plan: EnginePlan, bound: BoundEngine, *, free: int | None = None, discovered: Discovered | None = None
) -> MemoryPlan:
    """Estimate before anything is loaded; takes milliseconds.

    ``free``: bytes to reckon with instead of what the device says. ``discovered``: plugins to suggest, by default all
    that are installed and permitted. Raises :class:`DoesNotFit` with what is missing and what would help, and
    :class:`engine.execution.checkpoint.CheckpointError` for a checkpoint whose headers cannot be read.
    """
    free = free_memory(plan.device) if free is None else free
    judge = Judge(bound, open_checkpoint(plan.model.path), free)
    needs, room = judge.needs(plan), judge.room(plan)
    assert needs is not None, "the plan's own plugins are built"
    if needs.smallest > room.budget:
        # An engine process that starts has no need to know what else is installed.
        from engine.assembly.discovery import discover
        from engine.loop.memory.remedies import remedies

        notes: list[str] = []
        found = remedies(plan, judge, discovered or discover(plan.settings.plugins), notes.append)
        raise DoesNotFit("\n".join((_refusal(plan, needs, room, found), *notes)))
    return MemoryPlan(plan, needs, room)


def _refusal(plan: EnginePlan, needs: Needs, room: Room, found: tuple[Remedy, ...]) -> str:
    tokens = (needs.smallest_blocks - 1) * needs.block_size
    wanted = plan.settings.memory.kv_tokens
    pool = f"one request of model.max_len={plan.max_len}" if wanted is None else f"memory.kv_tokens={wanted}"
    parts = [
        ("weights", needs.weights, f"{plan.model.name} with quantizer={plan.choice('quantizer').name}, {plan.dtype}"),
        ("drafter", needs.drafter, f"weights of drafter={plan.choice('drafter').name}"),
        ("KV pool", needs.smallest_blocks * needs.block_bytes, f"{tokens} tokens: {pool}"),
        ("largest step", needs.workspace, f"scheduler.token_budget={plan.choice('scheduler').config['token_budget']}"),
        ("loading", max(0, needs.loading - needs.workspace), "beside the weights, beyond what the largest step takes"),
        ("tables", needs.tables, f"scheduler.max_requests={plan.choice('scheduler').config['max_requests']}"),
        ("recordings", needs.recordings, "of small steps and drafts, which are replayed"),
        ("host", needs.host, "what the process takes beside tensors"),
        ("graphs", needs.graphs, "set aside for recorded steps"),
    ]
    lines = [f"  {name:<13} {size(num_bytes):>11}  {why}" for name, num_bytes, why in parts if num_bytes]
    return "\n".join(
        (
            f"{plan.model.name} does not fit on this {plan.device.kind} device: it needs {size(needs.smallest)}, and "
            f"{size(room.budget)} may be used (memory.fraction={room.fraction:g} of the {size(room.free)} that are "
            f"free): {size(needs.smallest - room.budget)} are missing. Nothing was loaded.",
            *lines,
            *_advice(found),
        )
    )


def _advice(found: tuple[Remedy, ...]) -> list[str]:
    if not found:
        return ["No setting makes this model fit here."]
    if any(len(remedy.overrides) == 1 for remedy in found):
        head = "Any one of these makes it fit, the smallest loss first:"
    elif len(found) == 1:
        head = "No single setting makes it fit; this combination does:"
    else:
        head = "No single setting makes it fit; each of these combinations does:"
    return [head, *(f"  {i}. {remedy}" for i, remedy in enumerate(found, 1))]


def size_pool(memory: MemoryPlan, weights: int, free_now: int) -> Pool:
    """The pool that what is free after loading allows, at most what requests can use.

    ``weights``: bytes the weights really took; ``free_now``: bytes free on the device with the weights in place.
    Raises :class:`DoesNotFit` when memory that was free before loading is gone.
    """
    needs, room, plan = memory.needs, memory.room, memory.plan
    # Steps reuse what loading needed for a moment, so that part of the workspace is taken already.
    beside = needs.tables + needs.recordings + needs.host + needs.graphs + needs.drafter
    still = max(0, needs.workspace - needs.loading) + beside
    by_free = free_now - room.headroom - still
    by_budget = room.budget - (needs.fixed - needs.weights) - weights
    fits = min(by_free, by_budget) // needs.block_bytes
    blocks = min(needs.largest_blocks, fits)
    if blocks < FEWEST_BLOCKS or (plan.settings.memory.kv_tokens is not None and blocks < needs.smallest_blocks):
        raise DoesNotFit(
            f"no room for the KV pool after loading: {size(max(0, fits) * needs.block_bytes)} are left of the "
            f"{size(needs.smallest_blocks * needs.block_bytes)} it needs, although {size(room.free)} were free before: "
            f"another process took memory meanwhile, or steps take more than reckoned ({size(needs.workspace)}, graphs "
            f"{size(needs.graphs)}), or memory.fraction={room.fraction:g} counts on memory that others "
            "need. Free some, or set a smaller model.max_len or memory.kv_tokens"
        )
    capacity = (blocks - 1) * needs.block_size
    return Pool(blocks, min(plan.max_len, capacity), _pool_notes(memory, capacity))


def _pool_notes(memory: MemoryPlan, capacity: int) -> tuple[str, ...]:
    plan = memory.plan
    if capacity >= plan.max_len:
        return ()
    wanted = plan.settings.memory.kv_tokens
    why = "what is free after loading" if wanted is None else f"memory.kv_tokens={wanted}"
    return (
        f"requests may have {capacity} tokens instead of model.max_len={plan.max_len}: the KV pool holds no more, "
        f"because of {why}",
    )
