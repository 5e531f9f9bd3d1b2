"""A toy engine with a virtual clock, to see what a scheduler does to latency without running a model.

It follows the core's rules for a schedule (rows are given blocks in order; a running request that is short of blocks
preempts in the scheduler's order; new requests are admitted while there is room), with a paged cache that is only
counted, in one KV group or two. A step takes ``base_ms + per_token_ms * tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from engine.contracts.scheduler import (
    Blocks,
    RequestView,
    Schedule,
    ScheduledRow,
    Scheduler,
    SchedulerView,
    fit,
    minus,
    plus,
)
from engine.contracts.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the simulation. Times in ms, lengths in tokens."""

    arrives_ms: float
    prompt: int
    output: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated engine's size and speed."""

    rows: int = 8
    blocks: int = 256
    """Of the KV group that keeps every token."""
    window: int = 0
    """Tokens; not 0: there is a second KV group, with blocks for the window of each row and one step."""
    block_size: int = 16
    token_budget: int = 256
    itl_target_ms: float = 0.0
    base_ms: float = 5.0
    per_token_ms: float = 0.1
    num_draft_tokens: int = 0

    @property
    def pools(self) -> Blocks:
        """Blocks of each KV group."""
        step = -(-self.token_budget // self.block_size)
        return (self.blocks, self.rows * self._window_blocks + step) if self.window else (self.blocks,)

    @property
    def _window_blocks(self) -> int:
        """What the last tokens of a request take, and its next one."""
        return -(-self.window // self.block_size) + 1

    def held(self, num_blocks: int, computed: int) -> Blocks:
        """Of a request with room for so many blocks of tokens: what it holds of each group."""
        passed = max(0, computed - self.window + 1) // self.block_size if self.window else 0
        return (num_blocks, max(0, num_blocks - passed))[: len(self.pools)]

    def most_held(self, blocks: Blocks) -> Blocks:
        """At most, of a request whose tokens take ``blocks``, if they are computed in several steps."""
        step = -(-self.token_budget // self.block_size)
        return (blocks[0], *(min(count, self._window_blocks + step) for count in blocks[1:]))


@dataclass(slots=True)
class Trace:
    """What happened to one job."""

    job: Job
    token_ms: list[float] = field(default_factory=list)
    """When each output token was there."""
    preemptions: int = 0

    @property
    def ttft_ms(self) -> float:
        return self.token_ms[0] - self.job.arrives_ms

    @property
    def itl_ms(self) -> list[float]:
        return [after - before for before, after in zip(self.token_ms, self.token_ms[1:])]


@dataclass(slots=True)
class _Request:
    arrival: int
    trace: Trace
    known: int
    computed: int = 0
    blocks: int = 0
    """Of tokens that it has room for."""
    is_running: bool = False

    @property
    def name(self) -> str:
        return f"r{self.arrival}"

    @property
    def is_done(self) -> bool:
        return len(self.trace.token_ms) == self.trace.job.output


class Simulation:
    """Runs jobs to their end. Raises ``AssertionError`` on a stall or a broken rule."""

    def __init__(self, scheduler: Scheduler, machine: Machine, jobs: Sequence[Job]) -> None:
        self._scheduler = scheduler
        self._machine = machine
        self._requests = {
            request.name: request
            for request in (
                _Request(i, Trace(job), job.prompt) for i, job in enumerate(sorted(jobs, key=lambda j: j.arrives_ms))
            )
        }
        self._free = machine.pools
        self.now_ms = 0.0
        self.num_steps = 0
        self.step_tokens: list[int] = []

    def run(self, max_steps: int = 100_000) -> list[Trace]:
        """The traces, in order of arrival."""
        while pending := [r for r in self._requests.values() if not r.is_done]:
            assert self.num_steps < max_steps, f"{len(pending)} requests not done after {max_steps} steps"
            present = [r for r in pending if r.trace.job.arrives_ms <= self.now_ms]
            if not present:
                self.now_ms = min(r.trace.job.arrives_ms for r in pending)
                continue
            self._step(present)
        assert self._free == self._machine.pools, "blocks leaked"
        return [request.trace for request in self._requests.values()]

    def _step(self, present: list[_Request]) -> None:
        view = self._view(present)
        schedule = self._scheduler.plan(view)
        check_schedule(view, schedule)
        ran = self._fit(schedule)
        assert ran, f"stall at {self.now_ms} ms with {len(view.running)} running, {len(view.waiting)} waiting"
        drafts = {r.request_id: r.num_draft_tokens for r in view.running if r.remaining == 1}
        tokens = sum(count + drafts.get(name, 0) for name, (_, count) in ran.items())
        self.step_tokens.append(tokens)
        self.num_steps += 1
        self.now_ms += self._machine.base_ms + self._machine.per_token_ms * tokens
        for request, count in ran.values():
            self._advance(request, count)

    def _view(self, present: list[_Request]) -> SchedulerView:
        machine = self._machine
        views = sorted((self._describe(r) for r in present), key=lambda v: (v.priority, v.turn, v.arrival))
        running = tuple(v for v in views if v.is_running)
        return SchedulerView(
            running=running,
            waiting=tuple(v for v in views if not v.is_running),
            num_running=len(running),
            free_rows=machine.rows - len(running),
            free_blocks=self._free,
            token_budget=machine.token_budget,
            itl_target_ms=machine.itl_target_ms,
            step_cost=StepCost(machine.base_ms, machine.per_token_ms, 100),
            blocks_needed=lambda name, n: self._needed(self._requests[name], n),
            blocks_held=lambda name: self._held(self._requests[name]),
        )

    def _describe(self, r: _Request) -> RequestView:
        return RequestView(
            request_id=r.name,
            known=r.known,
            computed=r.computed,
            is_running=r.is_running,
            priority=r.trace.job.priority,
            arrival=r.arrival,
            max_total=r.trace.job.prompt + r.trace.job.output,
            num_draft_tokens=self._machine.num_draft_tokens if r.is_running else 0,
        )

    def _held(self, r: _Request) -> Blocks:
        return self._machine.held(r.blocks, r.computed)

    def _needed(self, r: _Request, num_tokens: int) -> Blocks:
        held, end = self._held(r), -(-(r.computed + num_tokens) // self._machine.block_size)
        whole = plus(held, (max(0, end - r.blocks),) * len(held))
        return minus(self._machine.most_held(whole) if num_tokens > self._machine.token_budget else whole, held)

    def _fit(self, schedule: Schedule) -> dict[str, tuple[_Request, int]]:
        ran: dict[str, tuple[_Request, int]] = {}
        for row in schedule.rows:
            request = self._requests[row.request_id]
            if request.is_running:
                self._make_room(request, row.num_tokens, schedule, ran)
            needed = self._needed(request, row.num_tokens)
            if not fit(needed, self._free):
                continue
            request.blocks += needed[0]
            request.is_running = True
            self._free = minus(self._free, needed)
            ran[row.request_id] = (request, row.num_tokens)
        return ran

    def _make_room(
        self, request: _Request, num_tokens: int, schedule: Schedule, ran: dict[str, tuple[_Request, int]]
    ) -> None:
        for name in schedule.preempt_order:
            if fit(self._needed(request, num_tokens), self._free):
                return
            victim = self._requests[name]
            if victim is not request and victim.is_running and name not in ran:
                self._vacate(victim)
                victim.computed = 0
                victim.trace.preemptions += 1

    def _vacate(self, request: _Request) -> None:
        self._free = plus(self._free, self._held(request))
        request.blocks = 0
        request.is_running = False

    def _advance(self, request: _Request, count: int) -> None:
        before = self._held(request)
        request.computed += count
        self._free = plus(self._free, minus(before, self._held(request)))
        if request.computed == request.known:
            request.known += 1
            request.trace.token_ms.append(self.now_ms)
        if request.is_done:
            self._vacate(request)


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
