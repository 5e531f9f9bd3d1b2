"""Slot ``scheduler``: who runs this step, and with how many tokens?

A scheduler is a pure function from a view of the queues to rows. It never allocates, never sees blocks by name
and never learns whether steps overlap: the core reserves KV blocks for the rows it returns, drops rows from the
tail when they do not fit, and then preempts in the order the scheduler stated.

Called from the engine's loop, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add, le
from typing import Protocol, runtime_checkable

from engine.contracts.step_cost import StepCost

Blocks = tuple[int, ...]
"""Numbers of KV blocks, one for each KV group of the model (see :mod:`engine.contracts.kv_allocator`)."""


def fit(needed: Blocks, free: Blocks) -> bool:
    """Whether so many blocks are there, in every group."""
    return all(map(le, needed, free))


def plus(some: Blocks, others: Blocks) -> Blocks:
    """Group by group."""
    return tuple(map(add, some, others))


def minus(some: Blocks, others: Blocks) -> Blocks:
    """Group by group; not below 0."""
    return tuple(max(0, a - b) for a, b in zip(some, others, strict=True))


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a scheduler sees it. Token counts; ``known - computed`` tokens could run now."""

    request_id: str
    known: int
    """Prompt and output tokens that exist (a token still being sampled on the device counts)."""
    computed: int
    """Of these, how many have keys and values in the cache (for a waiting request: its prefix-cache hit)."""
    is_running: bool
    """Holds a row in the device tables and a KV lease."""
    priority: int
    """Smaller runs earlier. The core orders a view by it and does no more: a scheduler honours it, in ``rows`` and in
    ``preempt_order``."""
    arrival: int
    """Running number by arrival; the tie-break."""
    max_total: int
    """Most tokens this request can ever have: prompt + max_tokens, capped by the model."""
    num_draft_tokens: int
    """Draft tokens the core wants verified on top of this request's last token if it decodes now (may be 0)."""
    start_tag: int = 0
    """Of start-time fair queuing between clients: smaller runs earlier among equal priorities and due times."""
    due_s: float = 0.0
    """When its first token is due, on the engine's clock: smaller runs earlier among equal priorities. 0: no request
    has a target (see :mod:`engine.loop.due_times`)."""

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Sort key: smaller is more important."""
        return (self.priority, self.due_s, self.start_tag, self.arrival)

    @property
    def remaining(self) -> int:
        """Known tokens not yet computed: 1 for a request that decodes, more for one that prefills."""
        return self.known - self.computed

    @property
    def decodes(self) -> bool:
        """One token is left to compute, so this row samples; drafts may come on top of it."""
        return self.remaining == 1


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Everything a scheduler may look at. Requests are sorted by :attr:`RequestView.order`."""

    running: tuple[RequestView, ...]
    """Requests that hold a row and have at least one token to compute."""
    waiting: tuple[RequestView, ...]
    """Requests not admitted yet, preempted ones included."""
    num_running: int
    """Rows in use, those of requests that cannot run this very step included."""
    free_rows: int
    """Further requests that can be admitted."""
    free_blocks: Blocks
    """KV blocks that are free or could be evicted from the prefix cache."""
    token_budget: int
    """``scheduler.token_budget``: most tokens in one step, draft tokens included."""
    itl_target_ms: float
    """A step with decoding requests in it should take no longer than this: the least target of those that decode, or
    ``scheduler.itl_target_ms``. 0: none."""
    step_cost: StepCost
    blocks_needed: Callable[[str, int], Blocks]
    """``blocks_needed(request_id, n)``: further blocks if ``n`` more of its tokens are computed. More than the token
    budget are computed in several steps: of a group that forgets tokens, that takes no more than a window and a step
    at once. Drafts do not count: the core gives them what is left once all rows have their blocks, and drops drafts for
    which nothing is left."""
    blocks_held: Callable[[str], Blocks]
    """``blocks_held(request_id)``: blocks that a running request holds, and would give back."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` of this request run in this step; draft tokens come on top and are the core's business."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A scheduler's answer.

    ``rows``: most important first; core drops from the tail when memory is short.
    ``preempt_order``: running requests that may be preempted when even the first row does not fit, first victim
    first. Leave a request out to protect it.
    """

    rows: tuple[ScheduledRow, ...]
    preempt_order: tuple[str, ...] = ()


@runtime_checkable
class Scheduler(Protocol):
    """The plugin. Must be pure: the same view gives the same schedule."""

    def plan(self, view: SchedulerView) -> Schedule:
        """Choose the rows of the next step.

        ``0 < num_tokens <= request.remaining`` for every row, each request at most once, no more new requests
        than ``view.free_rows``, tokens and drafts within ``view.token_budget``, and no new request beside running
        ones that the free blocks do not hold as well. An empty schedule while something could run is a stall and is
        reported.
        """
        ...
