"""A device that computes nothing: a step takes what the fitted step cost says, and its tokens mean nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contracts.step_cost import StepCost, StepWork
from engine.step.plan import RecordMove, RowResult, StepPlan, StepResult, StepRow
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.drafters import chance
from engine_lab.shared.simulation.spec import Drafts


@dataclass(slots=True)
class _Row:
    request: int
    """Its seed."""
    prompt_len: int
    output: Sequence[int]
    computed: int

    def upcoming(self, count: int) -> tuple[int, ...]:
        """What follows the tokens that are computed; after the end of the output, drafts that nobody takes."""
        start = self.computed - self.prompt_len
        return tuple(self.output[start : start + count]) + (0,) * max(0, start + count - len(self.output))


@dataclass(frozen=True, slots=True)
class Timed:
    """When a step ran."""

    device_ms: float
    draft_ms: float
    idle_ms: float
    done_s: float


class SimulatedDevice:
    """Fulfils :class:`engine.loop.core.Device`."""

    def __init__(self, clock: VirtualClock, cost: StepCost, drafts: Drafts | None, seed: int) -> None:
        self._clock = clock
        self.cost = cost
        self._drafts = drafts
        self._seed = seed
        self._rows: dict[int, _Row] = {}
        self.outputs: dict[int, Sequence[int]] = {}
        """What requests will answer, by their seeds."""
        self.last = Timed(0.0, 0.0, 0.0, clock.now)
        """Of the steps launched."""
        self.last_rows: tuple[StepRow, ...] = ()
        self._record_bytes: tuple[int, ...] = ()
        self._copy_rate = 1.0
        self._copied_until_s = 0.0
        self._copies: deque[tuple[float, Callable[[bool], None]]] = deque()
        """Blocks that are copied to memory: until when, and whom to tell."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        for admit in plan.admits:
            output = self.outputs[admit.seed]
            self._rows[admit.row_id] = _Row(admit.seed, admit.prompt_len, output, admit.num_computed)
        work, draft_ms = self._work(plan), self._draft_ms(plan)
        self.last = self.timed(self._copied_s(plan.loads), work, draft_ms)
        self.last_rows = plan.rows
        rows = tuple([self._run(row) for row in plan.rows])
        return self.waiting(plan.plan_id, rows, self.last, 1e3 * self._copy_s(plan.loads))

    def copies_records(self, num_bytes: Sequence[int], rate: float) -> None:
        """From now on there is memory for records. ``num_bytes``: of one, by group; ``rate``: bytes copied a second."""
        self._record_bytes, self._copy_rate = tuple(num_bytes), rate

    def store(self, moves: Sequence[RecordMove], done: Callable[[bool], None]) -> None:
        """Copy blocks to memory behind the steps that were launched; ``done`` is called by :meth:`end_copies`."""
        self._copied_until_s = self._copied_s(moves)
        self._copies.append((self._copied_until_s, done))

    def end_copies(self) -> None:
        """Tell of the copies that are done by now."""
        while self._copies and self._copies[0][0] <= self._clock.now:
            self._copies.popleft()[1](True)

    def _copied_s(self, moves: Sequence[RecordMove]) -> float:
        """When these are, behind all that was launched."""
        return max(self.last.done_s, self._copied_until_s, self._clock.now) + self._copy_s(moves)

    def _copy_s(self, moves: Sequence[RecordMove]) -> float:
        return sum([len(move.slots) * self._record_bytes[move.group] for move in moves]) / self._copy_rate

    def timed(self, free_s: float, work: StepWork, draft_ms: float = 0.0) -> Timed:
        """Of a step that may begin at ``free_s``."""
        device_ms, gap_ms = self.cost.ms(work), self.cost.gap_ms
        return Timed(device_ms, draft_ms, gap_ms, free_s + (gap_ms + device_ms + draft_ms) / 1e3)

    def waiting(
        self, plan_id: int, rows: tuple[RowResult, ...], timed: Timed, load_ms: float = 0.0
    ) -> Callable[[], StepResult]:
        """What waits for the end of a step."""

        def wait() -> StepResult:
            self._clock.now = max(self._clock.now, timed.done_s)
            return StepResult(plan_id, rows, timed.device_ms, timed.draft_ms, load_ms, timed.idle_ms)

        return wait

    def leap(self, num_steps: int, last: Timed) -> tuple[RowResult, ...]:
        """Every row of the last step decodes so many more tokens. Returns what the last of these steps, which takes
        these times, comes to."""
        results = []
        for row in self.last_rows:
            state = self._rows[row.row_id]
            state.computed += num_steps
            results.append(RowResult(state.upcoming(1)))
        self.last_rows = tuple([StepRow(row.row_id, row.max_start + num_steps, 1) for row in self.last_rows])
        self.last = last
        return tuple(results)

    def _work(self, plan: StepPlan) -> StepWork:
        decode_context = prefill_context = tokens = drafts = 0
        for row in plan.rows:
            tokens += row.num_queries
            drafts += row.num_drafts
            if row.num_tokens == 1 and row.samples and row.max_start >= self._rows[row.row_id].prompt_len:
                decode_context += row.max_end
            else:
                prefill_context += row.num_tokens * row.max_start + row.num_tokens * (row.num_tokens + 1) // 2
        return StepWork(len(plan.rows), tokens, decode_context, prefill_context, drafts)

    def _run(self, row: StepRow) -> RowResult:
        state = self._rows[row.row_id]
        state.computed += row.num_tokens
        if not row.samples:
            return RowResult()
        accepted = 0
        while accepted < row.num_drafts and self._accepts(state.request, state.computed + accepted, accepted):
            accepted += 1
        tokens = state.upcoming(accepted + 1)
        state.computed += accepted
        return RowResult(tokens, accepted)

    def _accepts(self, request: int, token: int, position: int) -> bool:
        """``position``: in its chain."""
        assert self._drafts is not None
        return chance(self._seed, request, token) < self._drafts.acceptance(request, position)

    def _draft_ms(self, plan: StepPlan) -> float:
        if self._drafts is None:
            return 0.0
        if self._drafts.placement == "host":
            asked = [row.num_drafts for row in plan.rows]
            return self._drafts.cost.ms(0, max(asked), sum(asked)) if any(asked) else 0.0
        if not plan.syncs_drafter:
            return 0.0
        wanted = [row.wants_drafts for row in plan.rows]
        return self._drafts.cost.ms(plan.num_tokens, max(wanted), sum(wanted))

    def resume(self) -> None: ...

    def close(self) -> None: ...
