"""``chunked_prefill``: prompts run in chunks beside the decodes (Sarathi-Serve, OSDI 2024).

Every step has two budgets. The *token* budget bounds the step's size. The *time* budget, in steps with decodes in
them, bounds how long those decodes wait: it is ``itl_target_ms`` turned into tokens by the measured step cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import merge
from operator import attrgetter

from engine.contracts.config import SchedulerConfig, at_least
from engine.contracts.provider import BuildContext
from engine.contracts.scheduler import RequestView, Schedule, SchedulerView
from engine_plugins.scheduler.step_room import StepRoom, step_tokens


@dataclass(frozen=True)
class ChunkedPrefillConfig(SchedulerConfig):
    min_chunk: int = 64
    """Prompt tokens that a step computes at least, if the token budget has room for them, however tight
    ``itl_target_ms`` is: a late token is better than a prompt that never gets on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("scheduler.min_chunk", self.min_chunk, 1)


class ChunkedPrefillScheduler:
    """Decodes first, then chunks of prompts.

    *Who goes first.* Decodes, then prompts, whether started or waiting, in the order of the view. If the most
    important running request is itself in its prompt, ``min_chunk`` tokens (at most half the budget) are kept for it.

    *How much.* Prompts get what the decodes leave of the token budget. With decodes in the step and an ITL target,
    they get no more than the time budget allows, but at least ``min_chunk`` tokens: slow progress of a prompt is
    preferred to none when the target cannot be met.

    *Long and short prompts.* A prompt that can finish in this step does. One that cannot leaves half of what is
    left to the prompts after it, and takes back what they do not use. So a long prompt never holds up short ones
    after it for its whole length; and short ones, however many keep coming, never take more than half from the
    long prompt that was there first. Within one priority nobody starves, whatever its due time. Between priorities
    there is no ageing: a low priority waits as long as higher ones fill the engine.

    *Chunks.* One that does not finish its prompt ends at a block border, if the budgets are not smaller than that.

    *Memory.* A request joins only if its whole prompt fits beside what the others still need; the first that does
    not fit holds up those after it. A decode that is short of a block takes it from the newest, least important
    request.
    """

    def __init__(self, config: ChunkedPrefillConfig, context: BuildContext) -> None:
        self._min_chunk = config.min_chunk
        self._block_size = context.block_size

    def plan(self, view: SchedulerView) -> Schedule:
        room = StepRoom(view, self._block_size)
        aside = min(-(-room.tokens // 2), self._min_chunk) if room.leader_prefills() else 0
        room.tokens -= aside
        room.place_decodes()
        room.tokens += aside
        self._place_prompts(view, room, self._allowance(view, room))
        return room.schedule()

    def _allowance(self, view: SchedulerView, room: StepRoom) -> int:
        """Tokens that prompts may take in this step; their time is that of the prompt which is first in line."""
        if room.is_empty or view.itl_target_ms <= 0:
            return room.tokens
        first = next(merge(room.prefills(), view.waiting, key=attrgetter("order")), None)
        context = first.computed if first else 0
        in_time = view.step_cost.tokens_within(view.itl_target_ms, room.decode_work(), context)
        return min(room.tokens, max(in_time, self._min_chunk))

    def _place_prompts(self, view: SchedulerView, room: StepRoom, left: int) -> None:
        started = room.prefills()
        # A running request gets a row in any case: the core may have no room for a newcomer, however important.
        aside = min(self._block_size, -(-left // 2)) if started and room.is_empty else 0
        num_after = len(started) + len(view.waiting)
        unfinished: list[RequestView] = []
        closed = False
        for request in merge(started, view.waiting, key=attrgetter("order")):
            num_after -= 1
            if left <= 0:
                break
            if closed and not request.is_running:
                continue
            is_first = not unfinished
            if aside and request.is_running:
                is_first, aside = True, 0
            count = self._first_share(request, room, left, left - aside, num_after, is_first)
            if count and not request.is_running and not room.admits(request):
                closed = True
                continue
            room.place(request, count)
            if count:
                left -= step_tokens(request, count)
            if 0 < count < request.remaining:
                unfinished.append(request)
        for request in unfinished:
            rest = room.chunk(request, left, aligned=True)
            room.place(request, rest)
            left -= rest

    @staticmethod
    def _first_share(request: RequestView, room: StepRoom, left: int, most: int, num_after: int, is_first: bool) -> int:
        """Tokens for a prompt, before what nobody else wanted is shared out: at most ``most`` of ``left``."""
        if request.decodes:
            return 1 if step_tokens(request, 1) <= most else 0
        if request.remaining > most and num_after:
            most = min(most, -(-left // 2))
        count = room.chunk(request, most, aligned=True)
        if not count and is_first:
            count = room.chunk(request, most, aligned=False)
        return count
