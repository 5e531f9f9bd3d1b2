"""Many equal steps at once: while the same requests decode and nobody else can join, only lengths change.

What a leap leaves behind is what the steps one by one would have: the same blocks in the same order, the same times.
This needs a scheduler that keeps on giving the same rows to the same requests, all of them decoding, and an engine
without KV stores, as copies to these come between steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from engine.contracts.step_cost import StepCost, StepWork
from engine.loop.core import CoreSettings, EngineCore, LoopPlugins
from engine.loop.sequence import Sequence
from engine.loop.step_cost import StepCostModel
from engine.step.plan import StepPlan
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.device import SimulatedDevice, Timed

MOST_STEPS = 64
"""Of one leap: most end early, when a request arrives."""


ANY = 1 << 24
"""Tokens: no step has more."""


class KnownCost(StepCostModel):
    """What steps of any size cost is known from the start, and does not change."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self._known = replace(cost, largest=StepWork.chunk(ANY))

    def observe(self, *step: object) -> None: ...

    def observe_drafts(self, *drafts: object) -> None: ...

    def cost(self) -> StepCost:
        return self._known


class FastForwardCore(EngineCore):
    """The engine's core, which knows what its simulated device will do."""

    def __init__(
        self, plugins: LoopPlugins, device: SimulatedDevice, settings: CoreSettings, clock: VirtualClock
    ) -> None:
        super().__init__(plugins, device, settings, clock)
        self._cost = KnownCost(device.cost)
        self._simulated = device
        self._virtual = clock
        self._after = settings.in_flight - 1
        """Steps in flight between two calls of :meth:`step`."""
        self._may_leap = not (
            plugins.drafter.max_width
            or self._after > 1
            or settings.limits.micro_batches > 1
            or any(group.forgets for group in settings.groups)
        )

    def foresee(self) -> list[Timed]:
        """The next equal steps, in the order in which they end, and those in flight after them: each brings every
        running request one token, and none its last one. Empty: the next step is not like the last one."""
        rows = self._decoding()
        steps = self._within_blocks(rows, min(MOST_STEPS, min(map(_tokens_left, rows)) - 1)) if rows else 0
        if steps <= 0:
            return []
        count, context = len(rows), sum(s.scheduled for s in rows)
        timed = [self._simulated.last]
        for _ in range(steps):
            context += count
            timed.append(self._simulated.timed(timed[-1].done_s, StepWork(count, count, context)))
        return timed if self._after else timed[1:]

    def leap(self, foreseen: list[Timed], num_steps: int) -> list[Sequence]:
        """Take the first ``num_steps`` of them. Returns whose tokens they brought."""
        rows = self._decoding()
        for sequence in rows:
            done, output = sequence.num_outputs, self._simulated.outputs[sequence.seed]
            sequence.tokens += output[done : done + num_steps]
        self._move_blocks(rows, num_steps)
        self._virtual.now = foreseen[num_steps - 1].done_s
        self._move_in_flight(num_steps, foreseen[num_steps - 1 + self._after])
        for sequence in rows:
            assert sequence.lease is not None
            sequence.scheduled += num_steps
            sequence.last_plan += num_steps
            sequence.num_decode_steps += num_steps
            sequence.last_token_s = self._virtual.now
            sequence.blocks_sent = [len(blocks) for blocks in sequence.lease.blocks]
        self._steps += num_steps
        self._planner.skip(num_steps)
        if not self._ledger:
            self._ledger.skip(rows[0].last_plan)
        return rows

    def kv_used(self) -> float:
        """As :attr:`engine.contracts.events.StepEvent.kv_used`."""
        return max(blocks.used for blocks in self._blocks())

    def _decoding(self) -> list[Sequence]:
        """The running sequences in the order of the last step, if they all decoded in it and nobody else may join."""
        running, last = self._queues.running, self._simulated.last_rows
        if not self._may_leap or self._pool.tiers is not None:
            return []
        if not running or len(running) != len(last) or len(self._ledger) != self._after:
            return []
        if (self._queues.waiting and self._pool.free_rows) or self._planner.suspects or self._outputs:
            return []
        by_row = {s.row_id: s for s in running if s.decodes and s.num_outputs and s.pending == self._after}
        rows = [by_row[row.row_id] for row in last if row.num_tokens == 1 and row.samples and row.row_id in by_row]
        return rows if len(rows) == len(running) else []

    def _within_blocks(self, rows: list[Sequence], steps: int) -> int:
        """As many of the steps as there are blocks for."""
        while steps > 0:
            needed = [self._pool.needed(s, 0, steps) for s in rows]
            if all(sum(of) <= free for *of, free in zip(*needed, self._pool.available(), strict=True)):
                break
            steps //= 2
        return steps

    def _move_blocks(self, rows: list[Sequence], num_steps: int) -> None:
        """Reserve and commit what the steps would have, in their order; between borders of blocks nothing happens."""
        size = self._settings.block_size
        grown: defaultdict[int, list[Sequence]] = defaultdict(list)
        filled: defaultdict[int, list[Sequence]] = defaultdict(list)
        for s in rows:
            for step in range(-s.scheduled % size + 1, num_steps + 1, size):
                grown[step].append(s)
            for step in range(size - s.computed % size, num_steps + 1, size):
                filled[step].append(s)
        computed = {s: s.computed for s in rows}
        for step in sorted({*grown, *filled}):
            for s in grown[step]:
                self._pool.grow(s, s.scheduled + step)
            for s in filled[step]:
                s.computed = computed[s] + step
                self._pool.commit(s)
        for s in rows:
            s.computed = computed[s] + num_steps
            self._pool.commit(s)

    def _move_in_flight(self, num_steps: int, last: Timed) -> None:
        device = self._simulated
        results = device.leap(num_steps, last)
        if not self._after:
            return
        step = self._ledger.oldest()
        plan = StepPlan(step.plan.plan_id + num_steps, (), device.last_rows)
        wait = device.waiting(plan.plan_id, results, last)
        self._ledger.launched(replace(step, plan=plan, wait=wait, follows_on=True))
        self._ledger.retire()


def _tokens_left(sequence: Sequence) -> int:
    of_request = sequence.request.sampling.max_tokens - sequence.num_outputs
    return min(of_request, sequence.max_total - len(sequence.tokens))
