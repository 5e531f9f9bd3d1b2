"""Conformance suite of the slot ``scheduler``. Subclass it in a test file and say how to build yours.

.. code-block:: python

    class TestMine(SchedulerConformance):
        def make(self):
            return Mine(SchedulerConfig(), build_context(BLOCK))

Properties are checked on random views, and on whole random workloads that the real loop serves on a virtual clock
(:mod:`engine.testing.simulation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from operator import attrgetter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.contracts.scheduler import (
    Blocks,
    RequestView,
    Schedule,
    ScheduledRow,
    Scheduler,
    SchedulerView,
    fit,
    plus,
)
from engine.contracts.step_cost import StepCost
from engine.plugin_guard.calls import lacking
from engine.testing.simulation import Job, Machine, Simulation
from engine.testing.subject import Subject, Suite, filled

BLOCK = 16
"""Block size of all views and simulations here, in tokens."""
WINDOW = 40
"""Tokens of the window of a second KV group."""
CALLS = 8
"""How often one view is planned."""

_QUICK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_LONG = settings(_QUICK, max_examples=25)


def make_view(
    running: list[RequestView],
    waiting: list[RequestView],
    free_rows: int = 8,
    free_blocks: int | Blocks = 1000,
    token_budget: int = 256,
    itl_target_ms: float = 0.0,
    step_cost: StepCost = StepCost(5.0, 0.1, 100),  # noqa: B008 (frozen)
    num_in_flight: int = 0,
) -> SchedulerView:
    """A view over a paged cache with blocks of :data:`BLOCK` tokens, exactly as many held as are computed.

    ``num_in_flight``: requests that hold a row and have nothing to compute in this step; ``free_blocks``: of two groups
    the second has a window of :data:`WINDOW` tokens.
    """
    by_id = {r.request_id: r for r in (*running, *waiting)}
    free = (free_blocks,) if isinstance(free_blocks, int) else free_blocks
    most = -(-(WINDOW + token_budget) // BLOCK) + 1

    def blocks_held(request_id: str) -> Blocks:
        request = by_id[request_id]
        whole = -(-request.computed // BLOCK) if request.is_running else 0
        return (whole, min(whole, whole - (request.computed - WINDOW + 1) // BLOCK))[: len(free)]

    def blocks_needed(request_id: str, n: int) -> Blocks:
        request = by_id[request_id]
        held = blocks_held(request_id)
        whole = -(-(request.computed + n) // BLOCK) - held[0]
        return (whole, min(whole, most - held[-1]) if n > token_budget else whole)[: len(free)]

    return SchedulerView(
        running=tuple(sorted(running, key=attrgetter("order"))),
        waiting=tuple(sorted(waiting, key=attrgetter("order"))),
        num_running=len(running) + num_in_flight,
        free_rows=free_rows,
        free_blocks=free,
        token_budget=token_budget,
        itl_target_ms=itl_target_ms,
        step_cost=step_cost,
        blocks_needed=blocks_needed,
        blocks_held=blocks_held,
    )


def request(
    arrival: int,
    known: int,
    computed: int = 0,
    is_running: bool = False,
    priority: int = 0,
    num_draft_tokens: int = 0,
    max_output: int = 16,
) -> RequestView:
    """A request named ``r<arrival>``."""
    return RequestView(
        request_id=f"r{arrival}",
        known=known,
        computed=computed,
        is_running=is_running,
        priority=priority,
        arrival=arrival,
        max_total=known + max_output,
        num_draft_tokens=num_draft_tokens,
    )


def decoding(arrival: int, known: int = 33, priority: int = 0, num_draft_tokens: int = 0) -> RequestView:
    """A running request with one token to compute."""
    return request(arrival, known, known - 1, True, priority, num_draft_tokens)


@st.composite
def views(draw: st.DrawFn) -> SchedulerView:
    """Random queues, budgets and memory, tight ones included."""
    running, waiting, blocks = [], [], st.one_of(st.integers(0, 4), st.integers(0, 100))
    token_budget = draw(st.integers(8, 300))
    for arrival in draw(st.permutations(range(draw(st.integers(0, 10))))):
        kind = draw(st.sampled_from(["decode", "prefill", "wait"]))
        priority = draw(st.integers(-1, 1))
        known = draw(st.integers(2, 400))
        if kind == "decode":
            num_drafts = draw(st.integers(0, 4))
            running.append(decoding(arrival, known, priority, num_drafts))
        elif kind == "prefill":
            computed = draw(st.integers(0, known - 1))
            running.append(request(arrival, known, computed, True, priority))
        else:
            computed = draw(st.integers(0, (known - 1) // BLOCK)) * BLOCK
            waiting.append(request(arrival, known, computed, False, priority))
    return make_view(
        running,
        waiting,
        free_rows=draw(st.integers(0, 8)),
        free_blocks=draw(st.one_of(blocks, st.tuples(blocks, blocks))),
        token_budget=token_budget,
        itl_target_ms=draw(st.sampled_from([0.0, 6.0, 20.0])),
        step_cost=StepCost(5.0, 0.1, draw(st.sampled_from([0, 100]))),
        num_in_flight=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Machine, list[Job]]:
    """Random jobs on a small machine; each job alone fits its cache."""
    machine = Machine(
        rows=draw(st.integers(1, 6)),
        blocks=draw(st.integers(14, 40)),
        block_size=BLOCK,
        token_budget=draw(st.sampled_from([8, 64, 256])),
        itl_target_ms=draw(st.sampled_from([0.0, 8.0])),
        num_draft_tokens=draw(st.sampled_from([0, 3])),
        window=draw(st.sampled_from([0, 5, WINDOW])),
        in_flight=draw(st.sampled_from([1, 2])),
    )
    job = st.builds(
        Job,
        arrives_ms=st.floats(0, 300),
        prompt=st.one_of(st.integers(1, 20), st.integers(1, 160)),
        output=st.integers(1, 50),
        priority=st.integers(0, 1),
    )
    return machine, draw(st.lists(job, min_size=1, max_size=10))


def check_schedule(view: SchedulerView, schedule: Schedule) -> None:
    """Assert everything the contract says about a schedule for ``view``."""
    _check_types(schedule)
    running = {r.request_id: r for r in view.running}
    waiting = {r.request_id: r for r in view.waiting}
    ids = [row.request_id for row in schedule.rows]
    assert len(set(ids)) == len(ids), f"a request is scheduled twice: {ids}"
    unknown = set(ids) - running.keys() - waiting.keys()
    assert not unknown, f"unknown requests: {unknown}"
    total = 0
    for row in schedule.rows:
        request = running.get(row.request_id) or waiting[row.request_id]
        assert 0 < row.num_tokens <= request.remaining, f"{row} of {request}"
        total += row.num_tokens + (request.num_draft_tokens if request.remaining == 1 else 0)
    # One decode with its drafts always fits: the core never asks for more drafts than the budget holds.
    assert total <= view.token_budget, f"{total} tokens in a budget of {view.token_budget}"
    new = [name for name in ids if name in waiting]
    assert len(new) <= view.free_rows, f"{len(new)} new requests for {view.free_rows} rows"
    _check_victims(view, schedule, new)


def _check_types(schedule: Schedule) -> None:
    assert isinstance(schedule, Schedule), f"a {type(schedule).__name__}, expected a Schedule"
    rows, order = schedule.rows, schedule.preempt_order
    assert isinstance(rows, tuple) and isinstance(order, tuple), "rows and preempt_order are tuples"
    for row in rows:
        assert isinstance(row, ScheduledRow) and type(row.num_tokens) is int, f"{row!r}, expected a ScheduledRow"


def _check_victims(view: SchedulerView, schedule: Schedule, new: list[str]) -> None:
    order = schedule.preempt_order
    running = {r.request_id for r in view.running}
    assert len(set(order)) == len(order), "a victim is named twice"
    assert set(order) <= running, f"victims that do not run: {set(order) - running}"
    assert not running or set(order) < running, "every running request may be preempted: nobody is sure to end"
    none = (0,) * len(view.free_blocks)
    needed = reduce(plus, (view.blocks_needed(row.request_id, row.num_tokens) for row in schedule.rows), none)
    if running and not fit(needed, view.free_blocks):
        assert not new, f"new requests join those who run: {needed} blocks are needed and {view.free_blocks} available"


class _Checked:
    """A scheduler whose every schedule is checked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = self._scheduler.plan(view)
        check_schedule(view, schedule)
        return schedule


class SchedulerConformance(ABC):
    """Tests every scheduler passes."""

    @abstractmethod
    def make(self) -> Scheduler:
        """A scheduler for blocks of :data:`BLOCK` tokens; budgets come with each view."""

    def plan(self, view: SchedulerView, scheduler: Scheduler | None = None) -> Schedule:
        """The schedule of a fresh scheduler, or of this one."""
        schedule: object = (scheduler or self.make()).plan(view)
        assert isinstance(schedule, Schedule), f"plan() returned {schedule!r:.60}, expected a Schedule"
        return schedule

    def test_fulfils_the_protocol(self) -> None:
        made = self.make()
        assert isinstance(made, Scheduler), lacking(made, Scheduler)

    def test_an_empty_engine_gets_an_empty_schedule(self) -> None:
        assert self.plan(make_view([], [])).rows == ()

    @_QUICK
    @given(view=views())
    def test_schedules_keep_the_rules(self, view: SchedulerView) -> None:
        check_schedule(view, self.plan(view))

    def test_no_more_requests_start_than_there_are_rows(self) -> None:
        for free_rows in range(4):
            view = make_view([], [request(arrival, 3 + arrival) for arrival in range(6)], free_rows=free_rows)
            schedule = self.plan(view)
            check_schedule(view, schedule)
            assert schedule.rows or not free_rows, "a stall: rows are free, and memory"

    @_QUICK
    @given(view=views())
    def test_planning_is_pure(self, view: SchedulerView) -> None:
        """Whatever it planned before, and however often: what happens every second or seventh time shows, too."""
        scheduler, first = self.make(), self.plan(view)
        for call in range(CALLS):
            again = self.plan(view, scheduler)
            assert again == first, f"call {call + 1} of one scheduler differs from the first of another"
        # Meanwhile those who wait have run, and were preempted.
        self.plan(make_view([decoding(r.arrival) for r in view.waiting], [request(99, 100)]), scheduler)
        assert self.plan(view, scheduler) == first, "another view changed the plan"

    @_QUICK
    @given(view=views())
    def test_something_runs_whenever_something_can(self, view: SchedulerView) -> None:
        rows = self.plan(view).rows
        if view.running:
            assert any(r.request_id == row.request_id for r in view.running for row in rows)
        elif view.waiting and view.free_rows and not view.num_running:
            first = view.waiting[0]
            if fit(view.blocks_needed(first.request_id, first.remaining), view.free_blocks):
                assert rows, "a stall: whoever is chosen, somebody must start"

    def test_the_running_get_a_row_whoever_else_waits(self) -> None:
        """The core may be unable to admit a newcomer (fragmented memory): that must not stop everybody."""
        for budget in (1, 8, 100):
            for running in (decoding(5), request(5, 400, 32, True)):
                view = make_view([running], [request(1, 300, priority=-1)], token_budget=budget)
                assert "r5" in {row.request_id for row in self.plan(view).rows}

    @_LONG
    @given(workload=workloads())
    def test_every_request_ends_and_every_block_comes_back(self, workload: tuple[Machine, list[Job]]) -> None:
        machine, jobs = workload
        simulation = Simulation(_Checked(self.make()), machine, jobs)
        traces = simulation.run(max_steps=20_000)
        assert [len(t.token_ms) for t in traces] == [t.job.output for t in traces]
        assert max(simulation.step_tokens) <= machine.token_budget


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [SchedulerConformance], make=lambda self: subject.build(subject.context(BLOCK)))
