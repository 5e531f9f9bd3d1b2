"""From the queues to a step plan: ask the scheduler, find room, preempt if there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contracts.events import Event, PrefixCacheEvent
from engine.contracts.scheduler import (
    RequestView,
    Schedule,
    ScheduledRow,
    Scheduler,
    SchedulerView,
    StepCost,
)
from engine.execution.step import Admit, StepPlan, StepRow
from engine.loop.drafting import Drafting
from engine.loop.pool import Pool
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status

HITS_LOOKED_UP = 64
"""Waiting requests, from the head of the queue, whose prefix hits a scheduler is told; the others show 0."""


class SchedulerBroken(RuntimeError):
    """A scheduler plugin raised or broke its contract."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one step."""

    token_budget: int
    itl_target_ms: float


@dataclass(slots=True)
class Draft:
    """A step plan in the making."""

    admits: list[Admit] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    owners: list[tuple[Sequence, int]] = field(default_factory=list)
    chosen: set[Sequence] = field(default_factory=set)
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    plan: StepPlan
    owners: tuple[tuple[Sequence, int], ...]
    preemptions: int


class Planner:
    """Makes the next step's plan. The only caller of the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        scheduler_name: str,
        queues: Queues,
        pool: Pool,
        drafting: Drafting,
        limits: Limits,
        step_cost: Callable[[], StepCost],
        emit: Callable[[Event], None],
    ) -> None:
        self._schedule = scheduler.plan
        self._name = scheduler_name
        self._queues = queues
        self._pool = pool
        self._drafting = drafting
        self._limits = limits
        self._step_cost = step_cost
        self._emit = emit
        self._next_id = 0
        self.suspects: deque[Sequence] = deque()
        """Sequences of a step that failed: each runs alone once, so that the guilty one fails alone."""

    def plan(self, something_in_flight: bool) -> Planned | None:
        """The next step, or ``None`` when nothing can run now."""
        if self.suspects:
            return None if something_in_flight else self._plan_suspect()
        cost = self._step_cost()
        widths = self._drafting.prepare(self._queues.running, cost)
        view = self._view(cost, widths)
        if not view.running and not view.waiting:
            return None
        try:
            schedule = self._schedule(view)
        except Exception as error:
            raise SchedulerBroken(f"scheduler={self._name} raised {type(error).__name__}: {error}") from error
        draft = self._fit(schedule, widths)
        if not draft.rows:
            if not something_in_flight:
                self._unblock(draft)
            return None
        return self._finish(draft)

    def _view(self, cost: StepCost, widths: dict[Sequence, int]) -> SchedulerView:
        running = tuple(
            self._describe(s, len(s.drafts) if self._drafting.on_host else widths.get(s, 0))
            for s in self._queues.running
            if s.can_run and not self._waits_for_tokens(s, widths)
        )
        waiting: tuple[RequestView, ...] = ()
        if self._pool.free_slots:
            waiting = tuple(self._describe(s, 0, i < HITS_LOOKED_UP) for i, s in enumerate(self._queues.waiting))
        return SchedulerView(
            running=running,
            waiting=waiting,
            num_running=len(self._queues.running),
            free_rows=self._pool.free_slots,
            free_blocks=self._pool.allocator.usage().available,
            token_budget=self._limits.token_budget,
            itl_target_ms=self._limits.itl_target_ms,
            step_cost=cost,
            blocks_needed=self._blocks_needed,
        )

    def _waits_for_tokens(self, sequence: Sequence, widths: dict[Sequence, int]) -> bool:
        """A drafter looks at all tokens of a request, so none may be in flight when drafts are wanted."""
        return sequence.pending > 0 and widths.get(sequence, 0) > 0

    def _describe(self, s: Sequence, draft_width: int, look_up: bool = False) -> RequestView:
        is_running = s.status is Status.RUNNING
        return RequestView(
            request_id=s.request_id,
            known=s.known,
            computed=s.scheduled if is_running else (self._pool.hit(s) if look_up else 0),
            is_running=is_running,
            priority=s.request.priority,
            arrival=s.arrival,
            max_total=s.max_total,
            draft_width=draft_width,
        )

    def _blocks_needed(self, request_id: str, num_tokens: int) -> int:
        s = self._queues.by_id[request_id]
        return self._pool.allocator.blocks_needed(s.lease, s.scheduled + num_tokens, s.max_total)

    def _fit(self, schedule: Schedule, widths: dict[Sequence, int]) -> Draft:
        """Reserve blocks row by row, most important first; what does not fit is dropped."""
        draft = Draft()
        admitting = True
        for row in schedule.rows:
            sequence = self._checked(row, draft)
            if sequence.status is Status.WAITING:
                admitting = admitting and self._admit(sequence, row, draft)
            else:
                self._continue(sequence, row, schedule, widths, draft)
        return draft

    def _checked(self, row: ScheduledRow, draft: Draft) -> Sequence:
        sequence = self._queues.by_id.get(row.request_id)
        if sequence is None or sequence in draft.chosen:
            what = "is unknown" if sequence is None else "was scheduled twice"
            raise SchedulerBroken(f"scheduler={self._name}: request {row.request_id!r} {what}")
        if not 0 < row.num_tokens <= sequence.known - (sequence.scheduled if sequence.lease else 0):
            raise SchedulerBroken(
                f"scheduler={self._name} gave {row.num_tokens} tokens to request {row.request_id!r}, "
                f"which has {sequence.known - sequence.scheduled} left"
            )
        return sequence

    def _admit(self, sequence: Sequence, row: ScheduledRow, draft: Draft) -> bool:
        if not self._pool.admit(sequence):
            return False
        num_tokens = min(row.num_tokens, sequence.known - sequence.scheduled)
        if not self._pool.grow(sequence, sequence.scheduled + num_tokens):
            self._pool.withdraw(sequence)
            return False
        self._queues.start(sequence)
        now = time.monotonic()
        sequence.first_step_s = sequence.first_step_s or now
        if sequence.keys is not None:
            self._emit(PrefixCacheEvent(now, len(sequence.tokens), sequence.scheduled))
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.scheduled
        draft.admits.append(
            Admit(
                slot=sequence.slot,
                tokens=tuple(sequence.tokens),
                prompt_len=sequence.prompt_len,
                params=sequence.request.sampling,
                seed=sequence.seed,
                stop_ids=tuple(sequence.stop_ids),
            )
        )
        self._add(sequence, num_tokens, (), 0, draft)
        return True

    def _continue(
        self,
        sequence: Sequence,
        row: ScheduledRow,
        schedule: Schedule,
        widths: dict[Sequence, int],
        draft: Draft,
    ) -> None:
        upto = sequence.scheduled + row.num_tokens
        drafts = sequence.drafts if upto == sequence.known else ()
        if drafts and not self._pool.grow(sequence, upto + len(drafts)):
            drafts = ()
        if not drafts and not self._pool.grow(sequence, upto):
            self._make_room(sequence, upto, schedule, draft)
            if not self._pool.grow(sequence, upto):
                return
        wants = 0 if self._drafting.on_host else widths.get(sequence, 0)
        self._add(sequence, row.num_tokens, drafts, wants, draft)

    def _make_room(self, sequence: Sequence, upto: int, schedule: Schedule, draft: Draft) -> None:
        """Preempt in the scheduler's order until the sequence fits, counting blocks that steps in flight hold."""
        for request_id in schedule.preempt_order:
            if self._pool.missing(sequence, upto) <= 0:
                return
            victim = self._queues.by_id.get(request_id)
            if victim is None or victim is sequence or victim in draft.chosen:
                continue
            if victim.status is Status.RUNNING:
                self.preempt(victim)
                draft.preemptions += 1

    def preempt(self, victim: Sequence) -> None:
        """Take everything from a running sequence; it will be computed again from its tokens."""
        self._pool.release(victim)
        self._queues.suspend(victim)
        victim.epoch += 1
        victim.num_preemptions += 1
        victim.scheduled = victim.computed = victim.pending = 0
        victim.drafts, victim.proposed_at, victim.drafts_in_flight = (), -1, False
        victim.prompt_logprobs.clear()

    def _unblock(self, draft: Draft) -> None:
        """Nothing could run and nothing is in flight: preempt the newest, so that the others can go on."""
        if draft.preemptions:
            return
        if len(self._queues.running) > 1:
            self.preempt(self._queues.running[-1])
        elif self._queues.running or not self._pool.free_slots:
            raise SchedulerBroken(f"scheduler={self._name} left {len(self._queues.running)} running requests idle")
        else:
            raise SchedulerBroken(f"scheduler={self._name} admitted none of {len(self._queues.waiting)} requests")

    def _add(self, s: Sequence, num_tokens: int, drafts: tuple[int, ...], wants_drafts: int, draft: Draft) -> None:
        assert s.lease is not None
        blocks = s.lease.blocks[0]
        samples = s.scheduled + num_tokens == s.known
        draft.rows.append(
            StepRow(
                slot=s.slot,
                start=s.scheduled,
                num_tokens=num_tokens,
                drafts=drafts,
                samples=samples,
                output_index=s.known - s.prompt_len,
                block_start=s.blocks_sent,
                new_blocks=tuple(blocks[s.blocks_sent :]),
                draft_probs=s.draft_probs if drafts else None,
                wants_drafts=wants_drafts,
            )
        )
        draft.owners.append((s, s.epoch))
        draft.chosen.add(s)
        s.blocks_sent = len(blocks)
        s.scheduled += num_tokens
        s.pending += samples
        s.drafts = ()
        s.drafts_in_flight = bool(drafts) or wants_drafts > 0

    def _plan_suspect(self) -> Planned | None:
        """One sequence of a failed step, alone, without the scheduler."""
        while self.suspects and self.suspects[0].status is not Status.RUNNING:
            self.suspects.popleft()
        if not self.suspects:
            return None
        draft = Draft()
        suspect = self.suspects[0]
        count = min(suspect.known - suspect.scheduled, self._limits.token_budget)
        if not self._pool.grow(suspect, suspect.scheduled + count):
            self.suspects.popleft()
            self.preempt(suspect)
            return None
        self._add(suspect, count, (), 0, draft)
        return self._finish(draft)

    def _finish(self, draft: Draft) -> Planned:
        plan = StepPlan(self._next_id, tuple(draft.admits), tuple(draft.rows))
        self._next_id += 1
        for sequence in draft.chosen:
            sequence.last_plan = plan.plan_id
        return Planned(plan, tuple(draft.owners), draft.preemptions)
