"""The step loop on a virtual clock: a device that computes the exact-integer model without tensors or time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.assembly.bind import bind, build_slots
from engine.contracts.graph import EVERY_TOKEN, KVSpec, Reach
from engine.contracts.request import EngineRequest
from engine.kv.groups import PoolShape, cache_groups
from engine.loop.core import CoreSettings, EngineCore
from engine.loop.planning import Limits
from engine.step.plan import RowResult, StepPlan, StepResult, StepRow, StepSkipped
from engine.testing.simulation import DeviceDrafts, VirtualClock
from tests.exact_model import next_token
from tests.laws.harness import BLOCK, VOCAB, _plan


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    computed: int
    drafts: list[int] = field(default_factory=list)


class SimulatedDevice:
    """Fulfils :class:`engine.loop.core.Device`. Each step takes ``ms(plan)``; drafts of its own are right with the
    chance ``accuracy``."""

    def __init__(
        self, clock: VirtualClock, ms: Callable[[StepPlan], float] = lambda plan: 1.0, accuracy: float = 0.5
    ) -> None:
        self.clock = clock
        self.plans: list[StepPlan] = []
        self.fail: Callable[[StepPlan], Exception | None] = lambda plan: None
        self._ms = ms
        self._accuracy = accuracy
        self._rows: dict[int, _Row] = {}
        self._free_at = clock.now
        self._failed = False
        self._rng = random.Random(7)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.plans.append(plan)
        for admit in plan.admits:
            self._rows[admit.row_id] = _Row(list(admit.tokens), admit.num_computed)
        error = StepSkipped("planned on top of a failed step") if self._failed else self.fail(plan)
        if error is not None:
            self._failed = True

            def broken() -> StepResult:
                raise error

            return broken
        started = max(self._free_at, self.clock.now)
        idle, self._free_at = started - self._free_at, started + self._ms(plan) / 1e3
        result = StepResult(plan.plan_id, tuple(map(self._run, plan.rows)), self._ms(plan), idle_ms=idle * 1e3)
        done = self._free_at

        def wait() -> StepResult:
            self.clock.now = max(self.clock.now, done)
            return result

        return wait

    def _run(self, row: StepRow) -> RowResult:
        state = self._rows[row.row_id]
        assert state.computed <= row.max_start, "a plan's positions are upper bounds"
        state.computed += row.num_tokens
        if not row.samples:
            return RowResult()
        assert state.computed == len(state.tokens), "all known tokens are computed before one is sampled"
        drafts = list(row.drafts) or state.drafts[: row.num_drafts]
        assert len(drafts) == row.num_drafts
        found = [next_token(state.tokens, VOCAB)]
        while len(found) <= len(drafts) and drafts[len(found) - 1] == found[-1]:
            found.append(next_token(state.tokens + found, VOCAB))
        state.computed += len(found) - 1
        state.tokens += found
        state.drafts = self._draft(state.tokens, row.wants_drafts)
        return RowResult(tuple(found), len(found) - 1)

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            right = next_token(tokens + drafts, VOCAB)
            drafts.append(right if self._rng.random() < self._accuracy else (right + 1) % VOCAB)
        return drafts

    def resume(self) -> None:
        self._failed = False

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Simulation:
    core: EngineCore
    device: SimulatedDevice
    allocator: Any

    def serve(self, *requests: EngineRequest) -> dict[str, list[int]]:
        """Outputs of requests that are submitted together."""
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.core.submit(request)
        while self.core.has_work:
            for out in self.core.step().outputs:
                outputs[out.request_id] += out.tokens
        return outputs


def simulate(
    *overrides: str,
    in_flight: int = 2,
    drafts: int = 0,
    adaptive: bool = False,
    kv_tokens: int = 4096,
    max_len: int = 256,
    reaches: tuple[Reach, ...] = (EVERY_TOKEN,),
    micro_batches: int = 1,
    kind: type[SimulatedDevice] = SimulatedDevice,
    **device: Any,
) -> Simulation:
    """A loop with the plugins of a plan. ``drafts``: by a drafter on the device, of each request; ``reaches``: of the
    KV groups, for which the pool is what an engine makes of ``kv_tokens`` tokens; ``kind``: of device, which is built
    with ``device``."""
    plan = _plan(("drafter=none", *overrides) if drafts else overrides)
    bound, clock = bind(plan), VirtualClock(1000.0)
    (allocator,) = build_slots(plan, ("kv_allocator",), replace(bound.context, clock=clock))["kv_allocator"]
    bound = replace(bound, kv_allocator=allocator)
    if drafts:
        bound = replace(bound, drafter=DeviceDrafts(drafts))
    budget = 64
    caches, rows = cache_groups([KVSpec(1, 1, reach) for reach in reaches]), bound.context.max_requests
    sizes = (BLOCK,) * len(reaches)
    shape = PoolShape(reaches, sizes, BLOCK, max_len, budget + drafts + 1, rows, caches.full_share)
    groups = shape.groups(caches, kv_tokens // BLOCK + 1)
    bound.kv_allocator.start(groups)
    simulated = kind(clock, **device)
    settings = CoreSettings(
        max_len=max_len, max_requests=bound.context.max_requests, block_size=BLOCK, groups=groups, vocab_size=VOCAB,
        limits=Limits(budget, 0.0, micro_batches), in_flight=in_flight, eos_token_ids=(), namespace="model", seed=0,
        max_width=max(drafts, bound.drafter.max_width), adaptive_drafts=adaptive,
    )  # fmt: skip
    return Simulation(EngineCore(bound, simulated, settings, clock), simulated, bound.kv_allocator)
