"""From the queues to a step plan: ask the scheduler, reserve blocks, preempt if there are none."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from engine.contracts.events import AdmittedEvent, Event, PreemptedEvent, PrefixCacheEvent
from engine.contracts.scheduler import (
    Blocks,
    RequestView,
    Schedule,
    ScheduledRow,
    Scheduler,
    SchedulerView,
)
from engine.contracts.step_cost import StepCost, StepWork
from engine.loop.drafting import Drafting
from engine.loop.filling import Fill
from engine.loop.pool import Pool
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status
from engine.loop.tiers import prompt_ms
from engine.plugin_guard.calls import PluginError, contract_error, describe_error, quote
from engine.step.plan import Admit, RecordMove, StepPlan

HITS_LOOKED_UP = 64
"""Waiting requests, from the head of the queue, whose prefix hits a scheduler sees; the others show 0."""


LEAD_FACTOR = 2.0
"""Prompts share steps, and wait for rows: what begins when it could just be in time alone is late in company. Of 1, 1.5
and 2, under three times the load, the last had most first tokens in time (``tools/benchmarks/classes.py``)."""


STEP_SHARE = 4
"""While a first token is awaited whose request has a target, no step takes more than such a part of it: those that wait
for a step, and come with others in the next one, are in time."""
FEWEST_PROMPT_TOKENS = 64
"""That there is room for in any step, if ``scheduler.token_budget`` has it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one step."""

    token_budget: int
    itl_target_ms: float
    micro_batches: int = 1
    """With pipeline stages: the steps in flight that rows which decode are spread over."""
    late_s: float = 0.0
    """How long a request whose first token is late makes way for those that are not."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A row that has its blocks."""

    num_tokens: int
    num_drafts: int = 0
    wants_drafts: int = 0


@dataclass(slots=True)
class Sketch:
    """A step plan in the making."""

    placed: dict[Sequence, Placed] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    admission_failed: bool = False
    filling: bool = False
    """Somebody was admitted whose records are not all copied by this step."""


@dataclass(frozen=True, slots=True)
class Planned:
    plan: StepPlan
    owners: tuple[tuple[Sequence, int], ...]
    preemptions: int
    asked: tuple[int, ...]
    """By row: drafts asked for, perhaps in vain, to be verified in this step."""
    draft_ms: float
    """Choosing how many, and asking a drafter on the host."""


class Planner:
    """Makes the next step's plan. The only caller of the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        queues: Queues,
        pool: Pool,
        drafting: Drafting,
        limits: Limits,
        step_cost: Callable[[], StepCost],
        emit: Callable[[Event], None],
        fail: Callable[[Sequence, str], None],
        clock: Callable[[], float],
    ) -> None:
        """``fail`` ends a sequence for a reason that is its own."""
        self._scheduler = scheduler
        self._queues = queues
        self._pool = pool
        self._drafting = drafting
        self._limits = limits
        self._step_cost = step_cost
        self._emit = emit
        self._fail = fail
        self._clock = clock
        self._next_id = 0
        self._last_tokens = 0
        """Of the last plan, where requests have targets."""
        self._preempted = 0
        """Preemptions since the last plan."""
        self._draft_ms = 0.0
        """Spent on drafts since the last plan."""
        self._hits: dict[Sequence, int] = {}
        """Prefix hits of the waiting requests in the current view."""
        self.suspects: deque[Sequence] = deque()
        """Sequences of a step that failed: each runs alone once, so that the guilty one fails alone."""

    def plan(self, something_in_flight: bool) -> Planned | None:
        """The next step, or ``None`` when nothing can run now."""
        if self.suspects:
            return None if something_in_flight else self._plan_suspect()
        started = self._clock()
        asked = self._drafting.prepare(self._queues.running)
        for sequence, why in self._drafting.take_failed():
            self._fail(sequence, why)
        self._draft_ms += (self._clock() - started) * 1e3
        sketch = self._sketch(asked, admitting=True)
        if sketch is None:
            return None
        if not sketch.placed and (sketch.admission_failed or sketch.filling) and self._queues.running:
            sketch = self._sketch(asked, admitting=False) or sketch
        if not sketch.placed:
            if not something_in_flight:
                self._unblock(sketch)
            return None
        return self._finish(sketch, asked)

    def skip(self, num_plans: int) -> None:
        """A simulator has made so many plans itself: their ids are taken."""
        self._next_id += num_plans

    def _sketch(self, asked: int, admitting: bool) -> Sketch | None:
        """Ask the scheduler and reserve blocks for its rows; ``None`` when there is nobody to ask about."""
        view = self._view(asked, admitting)
        if not view.running and not view.waiting:
            return None
        try:
            schedule = self._scheduler.plan(view)
        except Exception as error:
            raise PluginError(describe_error(error, self._scheduler, "plan")) from error
        if not isinstance(schedule, Schedule):
            raise self._broken(f"returned {quote(schedule)}, expected a Schedule")
        if not isinstance(schedule.rows, tuple | list) or not isinstance(schedule.preempt_order, tuple | list):
            raise self._broken(f"returned {quote(schedule)}, expected rows and preempt_order as tuples")
        return self._fit(schedule)

    def _broken(self, problem: str) -> PluginError:
        return contract_error(self._scheduler, "plan", problem)

    def _view(self, asked: int, admitting: bool) -> SchedulerView:
        budget = self._token_budget()
        if self._queues.waits_for_due_times:
            self._queues.sort_by_due(self._clock(), self._limits.late_s, self._lead_ms(budget))
        filling = self._still_filling()
        running = [s for s in self._queues.running if s not in filling] if filling else self._queues.running
        ready = [s for s in running if s.can_run and not self._drafting.waits_for_tokens(s, asked)]
        described = tuple(self._describe(s) for s in (self._micro_batch(ready) if self._pipelined else ready))
        self._hits.clear()
        waiting: tuple[RequestView, ...] = ()
        if admitting and self._pool.free_rows:
            looked_up = min(HITS_LOOKED_UP, 2 * self._pool.free_rows)
            waiting = tuple(self._describe(s, i < looked_up) for i, s in enumerate(self._admissible()))
        return SchedulerView(
            running=described,
            waiting=waiting,
            num_running=len(self._queues.running),
            free_rows=self._pool.free_rows,
            free_blocks=self._pool.available(),
            token_budget=budget,
            itl_target_ms=self._itl_target_ms(),
            step_cost=self._step_cost(),
            blocks_needed=self._blocks_needed,
            blocks_held=lambda request_id: self._pool.held(self._queues.by_id[request_id]),
        )

    def _admissible(self) -> list[Sequence]:
        """Those waiting that may run, less the first of them whose records are on their way."""
        waiting = self._queues.admissible()
        if not self._pool.tiers:
            return waiting
        cost, now, staged, ahead_ms = self._step_cost(), self._clock(), set[Sequence](), list[float]()
        if not all(s.looked for s in waiting[:HITS_LOOKED_UP]):
            left = [(s.prompt_len - s.scheduled, s.scheduled) for s in self._queues.running]
            ahead_ms = [prompt_ms(cost, StepWork.chunk(*tokens)) for tokens in left if tokens[0] > 0]
        for s in waiting[:HITS_LOOKED_UP]:
            if self._pool.stages(s, cost, now, ahead_ms):
                staged.add(s)
            else:
                ahead_ms.append(s.compute_ms)
        return [s for s in waiting if s not in staged]

    def _still_filling(self) -> list[Sequence]:
        """Those running whose records are not all copied by the next step."""
        filling, found = self._filling(), []
        left = self._loaded_bytes() if filling else 0
        for s, fill in filling:
            left -= fill.num_bytes
            if left < 0:
                found.append(s)
        return found

    def _filling(self) -> list[tuple[Sequence, Fill]]:
        return [(s, s.fill) for s in self._queues.running if s.fill is not None]

    def _loaded_bytes(self) -> float:
        """Of records that the next step copies, at most: those that decode wait for it."""
        decoding = [s for s in self._queues.running if s.fill is None and s.decodes]
        if not decoding or self._pool.tiers is None:
            return math.inf
        work = StepWork(len(decoding), len(decoding), sum(s.known for s in decoding))
        return self._pool.tiers.load_bound.most_bytes(self._step_cost().ms(work))

    def _token_budget(self) -> int:
        """Of a step: less than ``scheduler.token_budget`` where that would take too long for a first token."""
        queues, most = self._queues, self._limits.token_budget
        if not queues.has_ttft_targets:
            return most
        awaited = [
            s.request.ttft_ms for s in (*queues.waiting, *queues.running) if s.request.ttft_ms and not s.num_outputs
        ]
        if not awaited:
            return most
        decoding = [s for s in queues.running if s.decodes]
        tokens = sum(1 + self._num_drafts(s) for s in decoding)
        beside = StepWork(len(decoding), tokens, sum(s.known for s in decoding), num_drafts=tokens - len(decoding))
        in_time = self._step_cost().tokens_within(min(awaited) / STEP_SHARE, beside)
        return min(most, tokens + max(in_time, FEWEST_PROMPT_TOKENS))

    def _lead_ms(self, budget: int) -> Callable[[int], float]:
        """How soon the first token of a prompt can come: after the step that runs, and those that compute the prompt
        beside what runs."""
        cost, running = self._step_cost(), self._queues.running
        beside = StepWork(len(running), len(running), sum(s.known for s in running))
        now_ms = cost.ms(StepWork(len(running), self._last_tokens, beside.decode_context)) if running else 0.0

        def lead_ms(num_tokens: int) -> float:
            steps_ms = -(-num_tokens // budget) * cost.ms(beside + StepWork.chunk(min(num_tokens, budget)))
            return LEAD_FACTOR * (now_ms + steps_ms)

        return lead_ms

    def _itl_target_ms(self) -> float:
        """The least of those that decode."""
        mine = self._limits.itl_target_ms
        if not self._queues.has_itl_targets:
            return mine
        targets = [s.request.itl_ms or mine for s in self._queues.running if s.num_outputs or s.pending]
        return min(filter(None, targets), default=0.0) if targets else mine

    @property
    def _pipelined(self) -> bool:
        return self._limits.micro_batches > 1

    def _micro_batch(self, ready: list[Sequence]) -> list[Sequence]:
        """Of these, what the next of several steps in flight is for: no row whose tokens are in flight, which the
        first stage does not know, and of those that decode this step's share, the longest idle first."""
        decoding = sum(s.known > s.prompt_len for s in self._queues.running)
        known = [s for s in ready if s.pending == 0]
        share = -(-decoding // self._limits.micro_batches)
        mine = set(sorted((s for s in known if s.decodes), key=lambda s: s.last_plan)[:share])
        return [s for s in known if s in mine or not s.decodes]

    def _num_drafts(self, s: Sequence) -> int:
        """Drafts that will be verified after the last token; they never break the token budget alone."""
        if not s.decodes:
            return 0
        found = len(s.host_drafts) or s.device_drafts
        return max(0, min(found, s.max_drafts, self._limits.token_budget - 1))

    def _describe(self, s: Sequence, look_up: bool = False) -> RequestView:
        is_running = s.status is Status.RUNNING
        if look_up:
            self._hits[s] = self._pool.hit(s)
        return RequestView(
            request_id=s.request_id,
            known=s.known,
            computed=s.scheduled if is_running else self._hits.get(s, 0),
            is_running=is_running,
            priority=s.request.priority,
            arrival=s.arrival,
            max_total=s.max_total,
            num_draft_tokens=self._num_drafts(s),
            start_tag=s.start_tag,
            due_s=s.due_s,
        )

    def _blocks_needed(self, request_id: str, num_tokens: int) -> Blocks:
        sequence = self._queues.by_id[request_id]
        return self._pool.needed(sequence, self._hits.get(sequence, 0), num_tokens)

    def _fit(self, schedule: Schedule) -> Sketch:
        """Reserve blocks row by row, most important first; what does not fit is dropped. Drafts come last: no
        request is preempted for somebody's guess."""
        sketch, tokens = Sketch(), 0
        for row in schedule.rows:
            sequence = self._checked(row, sketch)
            tokens += row.num_tokens
            if tokens > self._limits.token_budget:
                raise self._broken(f"gave {tokens} tokens, scheduler.token_budget={self._limits.token_budget}")
            if sequence in sketch.preempted:
                continue
            if sequence.status is Status.RUNNING:
                self._continue(sequence, row.num_tokens, schedule, sketch)
            elif not sketch.admission_failed:
                sketch.admission_failed = not self._admit(sequence, row.num_tokens, sketch)
        sampling = [s for s, placed in sketch.placed.items() if s.scheduled + placed.num_tokens == s.known]
        wants = self._drafting.wants_after(sampling)
        for sequence in sampling:
            self._add_drafts(sequence, sketch, wants.get(sequence, 0))
        return sketch

    def _add_drafts(self, s: Sequence, sketch: Sketch, wants: int) -> None:
        """Verify the drafts that the sequence has, and have ``wants`` more proposed after, as far as blocks last."""
        num_tokens = sketch.placed[s].num_tokens
        drafts, end = self._num_drafts(s), s.scheduled + num_tokens
        if drafts and not self._pool.grow(s, end + drafts):
            drafts = 0
        # Of what may still come this step takes one token at least.
        wants = max(0, min(wants, s.max_drafts - 1))
        # The drafter writes keys, too: after the token that this step samples, and its drafts.
        if wants and not self._pool.grow(s, min(end + drafts + 1 + wants, s.max_total)):
            wants = 0
        sketch.placed[s] = Placed(num_tokens, drafts, wants)

    def _checked(self, row: ScheduledRow, sketch: Sketch) -> Sequence:
        if not isinstance(row, ScheduledRow):
            raise self._broken(f"returned a row {quote(row)}, expected a ScheduledRow")
        sequence = self._queues.by_id.get(row.request_id) if isinstance(row.request_id, str) else None
        if sequence is None or sequence in sketch.placed:
            what = "is unknown" if sequence is None else "has one already"
            raise self._broken(f"returned a row for request {quote(row.request_id)}, which {what}")
        left = sequence.known - (sequence.scheduled if sequence.lease else 0)
        if type(row.num_tokens) is not int or not 0 < row.num_tokens <= left:
            raise self._broken(
                f"gave {quote(row.num_tokens)} tokens to request {row.request_id!r}, which has {left} left"
            )
        return sequence

    def _admit(self, sequence: Sequence, num_tokens: int, sketch: Sketch) -> bool:
        if not self._pool.admit(sequence):
            return False
        num_tokens = min(num_tokens, sequence.known - sequence.scheduled)
        if not self._pool.grow(sequence, sequence.scheduled + num_tokens):
            self._pool.withdraw(sequence)
            return False
        self._queues.start(sequence)
        self._pool.count_hit(sequence)
        now = self._clock()
        sequence.first_step_s = sequence.first_step_s or now
        waited_ms = (now - (sequence.preempted_s or sequence.submitted_s)) * 1e3
        again = sequence.num_preemptions
        self._emit(AdmittedEvent(now, sequence.request_id, waited_ms, sequence.scheduled, again))
        if again == 0:
            sequence.num_cached, sequence.num_loaded = sequence.scheduled, sequence.loaded
            if sequence.keys is not None and not sequence.request.output:
                self._emit(PrefixCacheEvent(now, sequence.prompt_len, sequence.scheduled, sequence.request_id))
        if sequence.fill is not None and sequence in self._still_filling():
            sketch.filling = True
        else:
            sketch.placed[sequence] = Placed(num_tokens)
        return True

    def _continue(self, sequence: Sequence, num_tokens: int, schedule: Schedule, sketch: Sketch) -> None:
        upto = sequence.scheduled + num_tokens
        if not self._pool.grow(sequence, upto):
            self._make_room(sequence, upto, schedule, sketch)
            if not self._pool.grow(sequence, upto):
                return
        sketch.placed[sequence] = Placed(num_tokens)

    def _make_room(self, sequence: Sequence, upto: int, schedule: Schedule, sketch: Sketch) -> None:
        """Preempt in the scheduler's order until the sequence fits, counting blocks that steps in flight hold."""
        for request_id in schedule.preempt_order:
            if not self._pool.missing(sequence, upto):
                return
            victim = self._queues.by_id.get(request_id) if isinstance(request_id, str) else None
            if victim is None or victim is sequence or victim in sketch.placed:
                continue
            if victim.status is Status.RUNNING:
                self.preempt(victim, sequence)
                sketch.preempted.add(victim)

    def preempt(self, victim: Sequence, by: Sequence | None = None) -> None:
        """Take everything from a running sequence; it will be computed again from its tokens."""
        now = self._clock()
        self._emit(PreemptedEvent(now, victim.request_id, victim.computed, "" if by is None else by.request_id))
        self._pool.release(victim)
        self._queues.suspend(victim)
        self._preempted += 1
        victim.reset()
        victim.preempted_s = now

    def _unblock(self, sketch: Sketch) -> None:
        """Nothing could run and nothing is in flight: preempt the newest, so that the others can go on."""
        if sketch.preempted:
            return
        if len(self._queues.running) > 1:
            self.preempt(self._queues.running[-1])
        elif self._queues.running:
            raise self._broken("left the only running request idle")
        else:
            raise self._broken(f"admitted none of {len(self._queues.waiting)} requests, and none runs")

    def _plan_suspect(self) -> Planned | None:
        """One sequence of a failed step, alone, without the scheduler."""
        while self.suspects and self.suspects[0].status is not Status.RUNNING:
            self.suspects.popleft()
        if not self.suspects:
            return None
        suspect = self.suspects[0]
        count = min(suspect.known - suspect.scheduled, self._limits.token_budget)
        if not self._pool.grow(suspect, suspect.scheduled + count):
            self.suspects.popleft()
            self.preempt(suspect)
            return None
        return self._finish(Sketch(placed={suspect: Placed(count)}), asked=0)

    def _finish(self, sketch: Sketch, asked: int) -> Planned:
        wants_drafts = any(placed.wants_drafts for placed in sketch.placed.values())
        syncs = wants_drafts or any(not s.decodes for s in sketch.placed) or self._drafting.syncs([*sketch.placed])
        admits: list[Admit] = []
        loads = self._loads(sketch.placed)
        rows, asked_of = [], []
        for s, placed in sketch.placed.items():
            if not s.is_on_device:
                admits.append(s.admission())
            asked_of.append(self._drafting.asked_of(s, asked))
            parts = placed.num_tokens, placed.num_drafts, placed.wants_drafts
            rows.append(s.schedule(self._next_id, *parts, syncs, self._pipelined))
        if self._queues.has_ttft_targets:
            self._last_tokens = sum(placed.num_tokens for placed in sketch.placed.values())
        plan = StepPlan(self._next_id, tuple(admits), tuple(rows), syncs, loads)
        owners = tuple((sequence, sequence.epoch) for sequence in sketch.placed)
        self._next_id += 1
        preempted, self._preempted = self._preempted, 0
        draft_ms, self._draft_ms = self._draft_ms, 0.0
        return Planned(plan, owners, preempted, tuple(asked_of), draft_ms)

    def _loads(self, placed: Container[Sequence]) -> tuple[RecordMove, ...]:
        """Records for this step to copy: all of those that are computed in it, and some of others."""
        filling, loads = self._filling(), list[RecordMove]()
        left = self._loaded_bytes() if filling else 0
        for s, fill in sorted(filling, key=lambda each: each[0] not in placed):
            if s in placed or left > 0:
                before = fill.num_bytes
                loads += self._pool.loads(s, self._next_id, math.inf if s in placed else left)
                left -= before - fill.num_bytes
        return tuple(loads)
