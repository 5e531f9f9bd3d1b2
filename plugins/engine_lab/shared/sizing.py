"""What a plan takes of a device, here or only stated, and how many requests fit: by the code that serving starts with.

No weight is read; a directory with nothing but a ``config.json`` is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Literal

import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import BoundEngine, bind
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.graph import Graph, KVSpec
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.model import DeviceFacts
from engine.contracts.ops.work import Widths
from engine.contracts.step_cost import Mixture
from engine.loop.step_errors import StepCostReport
from engine.models.footprint import mixtures
from engine.models.placement import RankGraph
from engine.models.sharding import smallest_cut
from engine.models.work import held_bytes
from engine.startup.calibration import calibration
from engine.startup.memory.budget import Budget, free_memory
from engine.startup.memory.estimate import MemoryEstimate, estimate_memory
from engine.startup.memory.refusal import Suggestion, refusal, suggestions
from engine.startup.memory.weights import WeightSizes, weight_sizes
from engine.startup.placing import placed
from engine_lab.shared.capacity import checkpoint_of, most_requests
from engine_lab.shared.errors import EvalError, explained
from engine_lab.shared.stated import bind_stated, stated_plan


@dataclass(frozen=True, slots=True)
class Sizing:
    """A plan and its memory, of the rank with the fewest KV blocks."""

    plan: EnginePlan
    graph: Graph
    """Of the whole model."""
    units: Callable[..., int | None]
    """How its layers may be cut among ranks: ``engine_lab.shared.estimates.steps.Estimate.units``."""
    estimate: MemoryEstimate
    budget: Budget
    weights: int
    """Bytes of all ranks together."""
    blocks: int
    """KV blocks of a group that keeps every token, the padding block included; 0: it does not fit."""
    with_rows: Callable[[int], MemoryEstimate]
    """``estimate`` with another ``scheduler.max_requests``."""
    drafting: Literal["host", "device"] | None = None
    """Where drafts are proposed; ``None``: nowhere."""
    refusal: str = ""
    """Why the engine would refuse to start, and what to set; empty: it fits."""
    suggestions: tuple[Suggestion, ...] = ()
    """Of the refusal."""

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """Of experts, as step costs count them."""
        return mixtures(self.graph)

    @property
    def kv_per_token(self) -> float:
        """Bytes on this rank."""
        return sum(self.estimate.pool.block_bytes) / self.estimate.pool.block_size

    @property
    def kv_bits(self) -> float:
        """Of a cached number, shares of scales included."""
        numbers = sum(
            spec.num_kv_heads * spec.head_dim * (1 if spec.value_dim is not None else 2)
            for spec in self.graph.caches
            if isinstance(spec, KVSpec)
        )
        ranks = max(1, self.plan.layout.tp * self.plan.layout.pp)
        return 8.0 * self.kv_per_token * ranks / numbers if numbers else 16.0

    @property
    def widths(self) -> Widths:
        """Bits of a weight and of a cached number: those with which the model takes as many bytes as it does here."""
        values = 8.0 * getattr(torch, self.plan.dtype).itemsize
        plain, half = (held_bytes(self.graph, Widths(bits, bits, bits, values=values)) for bits in (16.0, 8.0))
        bits = 16.0 if plain == half else max(0.0, 8.0 + 8.0 * (self.weights - half) / (plain - half))
        return Widths(bits, bits, bits, self.kv_bits, values)

    @property
    def kv_tokens(self) -> int:
        """That the KV pool holds."""
        return max(0, self.blocks - 1) * self.estimate.pool.block_size

    @property
    def forgetful_tokens(self) -> Mapping[str, int]:
        """That KV groups hold which do not keep every token, by their names in metrics."""
        pool = self.estimate.pool
        counts = zip(pool.reaches, pool.blocks(self.blocks) if self.blocks else (), strict=False)
        return {
            reach.kind if reach.tokens is None else f"{reach.kind}_{reach.tokens}": (count - 1) * pool.block_size
            for reach, count in counts
            if reach.kind != "full"
        }

    @property
    def ledger(self) -> Mapping[str, int]:
        """Bytes by purpose."""
        found = self.estimate
        return {
            "weights": found.weights + found.drafter,
            "KV pool": found.pool.num_bytes(self.blocks or found.smallest_blocks),
            "largest step": max(found.loading, found.workspace) + found.programs,
            "tables": found.tables,
            "graphs": found.graphs,
            "process overhead": found.process_overhead,
            "KV stores": found.stores,
        }

    def concurrency(self, tokens: int, shared: int = 0) -> int:
        """Most requests of ``tokens`` tokens at once, the first ``shared`` of which all have in common: whole blocks of
        these are stored once. No more than ``scheduler.max_requests``."""
        pool, most = self.estimate.pool, self.plan.scheduler.max_requests
        return min(most, pool.requests(self.blocks, tokens + pool.block_size, shared)) if self.blocks else 0

    def by_memory(self, tokens: int, shared: int = 0) -> int:
        """The same if ``scheduler.max_requests`` were as high: as many as fit with the rows that they need. Schedulers
        admit a request if a block of every KV group is left for each that decodes, so each counts one more."""
        more = tokens + self.estimate.pool.block_size
        # A pool is of max_len tokens a row at most: where these are all used, the block that is left is another row's.
        rows = 1.0 if more <= self.plan.max_len else more / tokens

        def estimate(requests: int) -> MemoryEstimate:
            return self.with_rows(ceil(rows * requests))

        return most_requests(estimate, self.budget.usable, more, shared) if self.blocks else 0


def measured_step_cost(sizing: Sizing) -> StepCostReport | None:
    """What an engine with this plan has measured on this machine and kept; ``None``: none has."""
    kept = calibration(sizing.plan, sizing.mixtures)
    state = None if kept is None else kept.load()
    return None if state is None else StepCostReport(state.cost, state.errors, state.drafts)


def size_plan(
    overrides: Sequence[str],
    config_dirs: Sequence[Path] = (),
    device: DeviceFacts | None = None,
    memory: int | None = None,
) -> Sizing:
    """Resolve the plan of ``overrides`` and estimate it. ``device``: one that is only stated, ``None``: the one here;
    ``memory``: bytes free on it before anything is loaded, instead of what it has.

    Raises :class:`~engine_lab.shared.errors.EvalError` with every problem of the configuration, and for a checkpoint
    whose headers cannot be read.
    """
    try:
        return _sized(overrides, config_dirs, device, memory)
    except AssemblyError as error:
        raise EvalError(error.text().removeprefix("engine: ")) from error


def _sized(
    overrides: Sequence[str], config_dirs: Sequence[Path], device: DeviceFacts | None, memory: int | None
) -> Sizing:
    if device is None:
        plan = assemble(overrides, config_dirs=config_dirs)
        return _sized_plan(plan, bind(plan), free_memory(plan.device) if memory is None else memory)
    plan = stated_plan(overrides, config_dirs, device)
    return _sized_plan(plan, bind_stated(plan), device.memory_bytes if memory is None else memory)


def size_resolved(plan: EnginePlan) -> Sizing:
    """The same of a plan that is resolved already, as a server runs it. Raises as :func:`size_plan` does."""
    try:
        if plan.device.kind == "cpu":
            return _sized_plan(plan, bind(plan), free_memory(plan.device))
        return _sized_plan(plan, bind_stated(plan), plan.device.memory_bytes)
    except AssemblyError as error:
        raise EvalError(error.text().removeprefix("engine: ")) from error


def _sized_plan(plan: EnginePlan, bound: BoundEngine, free: int) -> Sizing:
    budget = Budget(free // plan.ranks_per_device, plan.settings.memory.fraction)
    graph = bound.graph
    found = []
    with explained():
        checkpoint = checkpoint_of(plan, bound)
        for own in placed(plan, bound):
            weights = weight_sizes(plan, bound, checkpoint, own.graph)
            estimate = estimate_memory(plan, weights, bound, own)
            blocks = estimate.pool.fitting(budget.usable - estimate.fixed, estimate.largest_blocks)
            with_rows = partial(_with_rows, plan, weights, bound, own)
            found.append((blocks if blocks >= FEWEST_BLOCKS else 0, estimate, with_rows))
    blocks, tightest, with_rows = min(found, key=lambda rank: rank[0])
    fits = tightest.smallest <= budget.usable
    return Sizing(
        plan=plan,
        graph=graph,
        units=partial(smallest_cut, bound.quantizer),
        estimate=tightest,
        budget=budget,
        weights=sum(estimate.weights for _, estimate, _ in found),
        blocks=blocks if fits else 0,
        with_rows=with_rows,
        drafting=bound.drafter.placement if bound.drafter.max_width else None,
        refusal="" if fits else refusal(plan, bound, tightest, budget),
        suggestions=() if fits else tuple(suggestions(plan, bound, tightest, budget)),
    )


def _with_rows(plan: EnginePlan, weights: WeightSizes, bound: BoundEngine, own: RankGraph, rows: int) -> MemoryEstimate:
    choice = plan.choice("scheduler")
    scheduler = replace(choice, config={**choice.config, "max_requests": rows})
    return estimate_memory(replace(plan, slots={**plan.slots, "scheduler": (scheduler,)}), weights, bound, own)
