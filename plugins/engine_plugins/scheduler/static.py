"""``static``: request-level batching, what serving looked like before Orca (OSDI 2022).

A batch is formed when nothing runs, and nobody joins it before its last request has finished: short answers wait
for long ones, and newcomers for everybody. Kept as the honest "before" of the other schedulers.
"""

from __future__ import annotations

from engine.contracts.config import SchedulerConfig
from engine.contracts.provider import BuildContext
from engine.contracts.scheduler import RequestView, Schedule, SchedulerView, fit, minus
from engine.contracts.step_cost import StepWork
from engine_plugins.scheduler.step_room import StepRoom, step_tokens


class StaticScheduler:
    """One batch after another, first come first served.

    A batch takes as many waiting requests as there are rows and blocks for their full length (prompt and most
    output tokens), so that none is ever preempted; with an ITL target no more than decode together in that time, one at
    least. Their prompts run in as few steps as the token budget allows,
    then all decode together. In the batch's first step every member gets at least one token: holding a row is what
    makes it a member.
    """

    def __init__(self, config: SchedulerConfig, context: BuildContext) -> None:
        self._block_size = context.block_size

    def plan(self, view: SchedulerView) -> Schedule:
        room = StepRoom(view, self._block_size)
        if view.num_running == 0:
            members = self._members(view)
            for request in members:
                room.place(request, 1)
            for request in members:
                room.place(request, min(request.remaining - 1, room.tokens))
            return room.schedule()
        for request in room.prefills():
            room.place(request, room.chunk(request, room.tokens, aligned=False))
        if room.is_empty:
            room.place_decodes()
        return room.schedule()

    def _members(self, view: SchedulerView) -> list[RequestView]:
        """The next batch: waiting requests in order, up to the first for which something does not suffice."""
        members: list[RequestView] = []
        tokens, blocks, decoding = view.token_budget, view.free_blocks, StepWork()
        for request in view.waiting[: view.free_rows]:
            tokens -= step_tokens(request, 1)
            whole = view.blocks_needed(request.request_id, request.max_total - request.computed)
            if tokens < 0 or not fit(whole, blocks):
                return members or self._alone(view)
            decoding += StepWork.decode(request.known)
            if members and 0 < view.itl_target_ms < view.step_cost.ms(decoding) + view.step_cost.gap_ms:
                return members
            blocks = minus(blocks, whole)
            members.append(request)
        return members

    @staticmethod
    def _alone(view: SchedulerView) -> list[RequestView]:
        """The first request, if at least what it has so far fits: it may well end before its longest."""
        first = view.waiting[0]
        fits = fit(view.blocks_needed(first.request_id, first.remaining), view.free_blocks)
        return [first] if fits else []
