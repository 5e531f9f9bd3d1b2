"""Filling a step: the arithmetic of tokens, rows and blocks that all built-in schedulers share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import attrgetter

from engine.contracts.scheduler import (
    Blocks,
    RequestView,
    Schedule,
    ScheduledRow,
    SchedulerView,
    fit,
    minus,
    plus,
)
from engine.contracts.step_cost import StepWork


def step_tokens(request: RequestView, num_tokens: int) -> int:
    """Tokens of the budget that a row takes, drafts included."""
    return num_tokens + (request.num_draft_tokens if request.decodes else 0)


class StepRoom:
    """What is left of a step's tokens, rows and blocks, and the rows placed so far.

    Blocks of drafts are not counted: where they do not fit, the core verifies fewer drafts, which is no reason to
    leave a row out.
    """

    def __init__(self, view: SchedulerView, block_size: int) -> None:
        self._view = view
        self._block_size = block_size
        self._placed: dict[str, tuple[RequestView, int]] = {}
        self._survivors = list(view.running)
        """Running requests, most important first, less those that give their blocks to a more important one."""
        self._leader = self._survivors[0] if self._survivors else None
        self._spare: Blocks | None = None
        self.tokens = view.token_budget
        self.rows = view.free_rows
        self.blocks = view.free_blocks
        self.short_of_blocks = False
        """A running request did not get the blocks it asked for: no time to admit others."""

    @property
    def is_empty(self) -> bool:
        return not self._placed

    def place(self, request: RequestView, num_tokens: int) -> None:
        """Add a row, or make the request's row longer by ``num_tokens``."""
        if num_tokens <= 0:
            return
        before = self._tokens_of(request)
        self.tokens -= step_tokens(request, num_tokens)
        self.blocks = minus(self.blocks, self._further_blocks(request, before, num_tokens))
        if not request.is_running and not before:
            self.rows -= 1
        self._placed[request.request_id] = (request, before + num_tokens)

    def place_decodes(self) -> int:
        """Place all running requests that decode, most important first. Returns the tokens they take.

        One that is short of a block takes it from the least important running request, which then sits out: the
        core will preempt it. The most important request always gets a row, so something always moves.
        """
        before = self.tokens
        for index, request in enumerate(self._view.running):
            if index >= len(self._survivors):
                break
            if not request.decodes:
                continue
            if step_tokens(request, 1) > self.tokens and self._placed:
                break
            if not fit(self._further_blocks(request, 0, 1), self.blocks):
                self.short_of_blocks = True
                if index + 1 < len(self._survivors):
                    given = self._view.blocks_held(self._survivors.pop().request_id)
                    self.blocks = plus(self.blocks, given)
                elif index > 0:
                    break
            self.place(request, 1)
        return before - self.tokens

    def decode_work(self) -> StepWork:
        """Of the rows placed so far that decode."""
        placed = [request for request, _ in self._placed.values() if request.decodes]
        context = sum(request.known + request.num_draft_tokens for request in placed)
        drafts = sum(request.num_draft_tokens for request in placed)
        return StepWork(len(placed), len(placed) + drafts, context, num_drafts=drafts)

    def prefills(self) -> list[RequestView]:
        """Running requests with more than one token to compute, most important first."""
        return [request for request in self._survivors if not request.decodes]

    def leader_prefills(self) -> bool:
        """The most important running request is in the middle of its prompt."""
        return self._leader is not None and not self._leader.decodes

    def chunk(self, request: RequestView, most: int, aligned: bool) -> int:
        """How many (more) tokens of a prompt to place: at most ``most``, and as many as the free blocks hold.

        ``aligned``: a chunk that does not finish the prompt ends at a block border (0 if it would be empty).
        The most important running request gets its next block even if there is none; the core will preempt.
        """
        before = self._tokens_of(request)
        done, remaining = request.computed + before, request.remaining - before
        size = min(most, remaining)
        if size <= 0:
            return 0
        lacking = max(minus(self._further_blocks(request, before, size), self.blocks))
        if lacking > 0:
            self.short_of_blocks |= request.is_running
            # A block less of tokens takes a block less of every group.
            size = (-(-(done + size) // self._block_size) - lacking) * self._block_size - done
            if size <= 0 or not fit(self._further_blocks(request, before, size), self.blocks):
                if before or request is not self._leader:
                    return 0
                size = min(most, remaining, self._block_size - done % self._block_size)
        if aligned and size < remaining:
            size = max(0, size - (done + size) % self._block_size)
        return size

    def admits(self, request: RequestView) -> bool:
        """May this waiting request join? If so, the blocks of its whole prompt are spoken for.

        Blocks that running prompts still need, and one for each request that will decode, are left alone:
        otherwise a newcomer would be preempted as soon as the others grow, and its work done twice.
        """
        if self.rows <= 0 or self.short_of_blocks:
            return False
        whole = self._view.blocks_needed(request.request_id, request.remaining)
        if self._spare is None:
            promised = [self._view.blocks_needed(r.request_id, r.remaining) for r in self._survivors]
            self._spare = minus(self._view.free_blocks, self._each(self._view.num_running))
            self._spare = reduce(minus, promised, self._spare)
        if not fit(whole, self._spare):
            return False
        self._spare = minus(self._spare, plus(whole, self._each(1)))
        return True

    def _each(self, count: int) -> Blocks:
        """So many blocks of every group."""
        return (count,) * len(self._view.free_blocks)

    def schedule(self) -> Schedule:
        """The rows, running requests before new ones and the most important first; victims the other way round."""
        placed = sorted(self._placed.values(), key=lambda p: (not p[0].is_running, p[0].order))
        rows = tuple(ScheduledRow(request.request_id, count) for request, count in placed)
        return Schedule(rows, preempt_order(self._view.running))

    def _tokens_of(self, request: RequestView) -> int:
        row = self._placed.get(request.request_id)
        return row[1] if row else 0

    def _further_blocks(self, request: RequestView, before: int, num_tokens: int) -> Blocks:
        """Blocks that ``num_tokens`` tokens take on top of the ``before`` that are placed already."""
        needed = self._view.blocks_needed(request.request_id, before + num_tokens)
        return minus(needed, self._view.blocks_needed(request.request_id, before)) if before else needed


def preempt_order(running: Iterable[RequestView]) -> tuple[str, ...]:
    """Least important first, newest first among equals; the most important request is never preempted."""
    return tuple(request.request_id for request in sorted(running, key=attrgetter("order"), reverse=True)[:-1])
