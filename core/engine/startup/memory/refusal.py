"""Why a model does not fit: a table of what each part takes, how much is missing, and what to set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.ops.work import Widths
from engine.models.work import held_bytes
from engine.startup.memory.budget import Budget
from engine.startup.memory.estimate import MemoryEstimate
from engine.startup.memory.report import size
from engine.startup.memory.weights import quantized_bytes

MOST_FRACTION = 0.95
"""The rest is for fragmentation and for what other processes do meanwhile."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Overrides that should make it fit."""

    overrides: tuple[str, ...]
    effect: str


def refusal(plan: EnginePlan, bound: BoundEngine, estimate: MemoryEstimate, budget: Budget) -> str:
    """The message, of one screen."""
    hints = [f"  {' '.join(each.overrides):<26}  {each.effect}" for each in suggestions(plan, bound, estimate, budget)]
    no_hint = (
        f"No memory.fraction up to {MOST_FRACTION:g}, smaller {_length_key(plan)} or quantizer of fewer bits is enough"
        f" alone: without the KV pool it takes {size(estimate.fixed)}. Combine them, or use a smaller model."
    )
    return "\n".join(
        (
            f"{plan.model.name} does not fit on this {plan.device.kind} device: it needs {size(estimate.smallest)} and "
            f"{size(budget.usable)} may be used (memory.fraction={budget.fraction:g} of the {size(budget.free)} that "
            f"are free{_shared(plan)}): {size(estimate.smallest - budget.usable)} are missing. Nothing was loaded.",
            *(f"  {name:<17}{size(taken):>11}  {why}" for name, taken, why in _parts(plan, estimate) if taken),
            *(["Any one of these lines should make it fit:", *hints] if hints else [no_hint]),
        )
    )


def _shared(plan: EnginePlan) -> str:
    ranks = plan.ranks_per_device
    return f" for each of {ranks} ranks on it" if ranks > 1 else ""


def _parts(plan: EnginePlan, estimate: MemoryEstimate) -> tuple[tuple[str, int, str], ...]:
    """Name, bytes, and the settings they follow from."""
    scheduler, wanted = plan.scheduler, plan.settings.memory.kv_tokens
    tokens = (estimate.smallest_blocks - 1) * estimate.pool.block_size
    pool = f"one request of model.max_len={plan.max_len}" if wanted is None else f"memory.kv_tokens={wanted}"
    requests = f"scheduler.max_requests={scheduler.max_requests}"
    weights = f"{plan.model.name} with quantizer={plan.choice('quantizer').name}, {plan.dtype}"
    loading = max(0, estimate.loading - estimate.workspace)
    return (
        ("weights", estimate.weights, weights),
        ("drafter", estimate.drafter, f"weights of drafter={plan.choice('drafter').name}"),
        ("KV pool", estimate.pool.num_bytes(estimate.smallest_blocks), f"{tokens} tokens: {pool}"),
        ("largest step", estimate.workspace, f"scheduler.token_budget={scheduler.token_budget}, {requests}"),
        ("loading", loading, "copies while weights are loaded, beyond what the largest step takes"),
        ("tables", estimate.tables, requests),
        ("programs", estimate.programs, "native calls of small steps and drafts"),
        ("process overhead", estimate.process_overhead, "Python objects, buffers of libraries, holes in the heap"),
        ("graphs", estimate.graphs, "reserved for captured steps"),
        ("KV stores", estimate.stores, "kv_store plugins that keep records in memory"),
    )


def suggestions(plan: EnginePlan, bound: BoundEngine, estimate: MemoryEstimate, budget: Budget) -> Iterator[Suggestion]:
    """What would be enough alone, from the smallest loss to the user to the largest: what computes the same first."""
    # One byte more than needed: a fraction of the free memory is rounded down.
    share = math.ceil((estimate.smallest + 1) * 100 / max(1, budget.free)) / 100
    if share <= MOST_FRACTION:
        yield Suggestion(
            (f"memory.fraction={share:g}",), f"leaves {1 - share:.0%} of the free memory to other processes"
        )
    key, now = _length_key(plan), plan.settings.memory.kv_tokens or plan.max_len
    if tokens := _tokens_within(estimate, budget.usable):
        yield Suggestion((f"{key}={tokens}",), f"instead of {now}: the KV pool shrinks with it")
    if rows := _rows_within(estimate, budget.usable):
        yield Suggestion((f"scheduler.max_requests={rows}",), "recurrent layers keep a state for each row")
    yield from _quantizers(plan, bound, estimate, budget)


def _quantizers(plan: EnginePlan, bound: BoundEngine, estimate: MemoryEstimate, budget: Budget) -> Iterator[Suggestion]:
    """Every installed quantizer that is enough, of most bits first; if none is and no length alone, each with the
    length that fits then."""
    from engine.assembly.discovery import discover  # an engine that fits does without

    if plan.model.quantization is not None:
        return
    dtype = getattr(torch, plan.dtype)
    now = plan.quantizer.weight_bits or 8 * dtype.itemsize
    offers = discover(plan.settings.plugins).of_slot("quantizer")
    narrower = [(bits, offer.name) for offer in offers if (bits := offer.config_class.weight_bits or now) < now]
    # Of a rank's weights as of all: what a rank has is a part of every layer, or of the layers.
    whole = held_bytes(bound.graph, Widths(now, now, now, values=8.0 * dtype.itemsize))
    alone, shortened = [], []
    for bits, name in sorted(narrower, key=lambda offer: (-offer[0], offer[1])):
        taken = int(estimate.weights * quantized_bytes(bound.graph, dtype, bits) / whole)
        usable = budget.usable + estimate.weights - taken
        effect = f"weights take about {size(taken)} instead of {size(estimate.weights)}: less exact"
        if estimate.smallest <= usable:
            alone.append(Suggestion((f"quantizer={name}",), effect))
        elif tokens := _tokens_within(estimate, usable):
            shortened.append(Suggestion((f"quantizer={name}", f"{_length_key(plan)}={tokens}"), effect))
    yield from alone
    if not alone and not _tokens_within(estimate, budget.usable):
        yield from shortened


def _length_key(plan: EnginePlan) -> str:
    return "model.max_len" if plan.settings.memory.kv_tokens is None else "memory.kv_tokens"


def _rows_within(estimate: MemoryEstimate, usable: int) -> int:
    """Most rows whose states fit, all else as it is; 0 if none do, or if there are no states."""
    pool = estimate.pool
    if all(reach.kind != "state" for reach in pool.reaches):
        return 0

    def taken(rows: int) -> int:
        tables = estimate.tables * (rows + 1) // (pool.max_requests + 1)  # one row more is nobody's
        return replace(estimate, tables=tables, pool=replace(pool, max_requests=rows)).smallest

    return next((rows for rows in range(pool.max_requests - 1, 0, -1) if taken(rows) <= usable), 0)


def _tokens_within(estimate: MemoryEstimate, usable: int) -> int:
    """Most tokens in whole blocks whose pool fits, all else as it is; 0 if no useful pool does."""
    blocks = estimate.pool.fitting(usable - estimate.fixed, estimate.largest_blocks)
    return (blocks - 1) * estimate.pool.block_size if blocks >= FEWEST_BLOCKS else 0
