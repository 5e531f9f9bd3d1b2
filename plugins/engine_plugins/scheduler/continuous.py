"""``continuous``: iteration-level scheduling (Orca, OSDI 2022): requests join and leave at every step.

Good throughput, but a prompt runs whole, so everybody who decodes waits for as long as the newcomer's prompt takes.
``chunked_prefill`` is this without those stalls.
"""

from __future__ import annotations

from engine.contracts.config import SchedulerConfig
from engine.contracts.provider import BuildContext
from engine.contracts.scheduler import Schedule, SchedulerView
from engine_plugins.scheduler.step_room import StepRoom, step_tokens


class ContinuousScheduler:
    """Decodes first, then whole prompts while tokens, rows and blocks last.

    Prompts start strictly in the order of the view: one that has to wait holds up those after it, never the other
    way round, so none starves. A prompt longer than what the decodes leave of the token budget runs in pieces of that
    size, and no other prompt runs until it is done. A decode that is short of a block takes it from the newest,
    least important request.
    """

    def __init__(self, config: SchedulerConfig, context: BuildContext) -> None:
        self._block_size = context.block_size

    def plan(self, view: SchedulerView) -> Schedule:
        room = StepRoom(view, self._block_size)
        aside = min(room.tokens, self._block_size) if room.leader_prefills() else 0
        room.tokens -= aside
        room.place_decodes()
        room.tokens += aside
        if self._finish_started(room):
            self._start_waiting(view, room)
        return room.schedule()

    def _finish_started(self, room: StepRoom) -> bool:
        """Go on with prompts that run in pieces. False: one of them is still not done after this step."""
        for request in room.prefills():
            count = room.chunk(request, room.tokens, aligned=False)
            room.place(request, count)
            if count < request.remaining:
                return False
        return True

    def _start_waiting(self, view: SchedulerView, room: StepRoom) -> None:
        is_first = True
        for request in view.waiting:
            is_whole = step_tokens(request, request.remaining) <= room.tokens
            may_be_cut = is_first and room.tokens > 0 and not request.decodes
            if not (is_whole or may_be_cut) or not room.admits(request):
                return
            room.place(request, min(request.remaining, room.tokens))
            is_first = False
