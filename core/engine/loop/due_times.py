"""When first tokens are due: the order of requests that have targets for their TTFT.

A request is due at its arrival and its target: earliest due date first, so that requests of a far target wait for those
of a near one, but not for ever. Of those with one target, clients share: in the order of their start tags they get the
due times of all of them. Who cannot be in time any more makes way for those who can, for a stated time: under overload
some are served in time instead of all too late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from engine.loop.sequence import Sequence


def own_due_s(sequence: Sequence) -> float:
    """0: it has no target."""
    target_ms = sequence.request.ttft_ms
    return sequence.submitted_s + target_ms / 1e3 if target_ms else 0.0


def assign(waiting: Iterable[Sequence], now_s: float, late_s: float, lead_ms: Callable[[int], float]) -> None:
    """Set ``due_s`` of sequences that wait. ``late_s``: how far behind its due time one goes that is late;
    ``lead_ms``: how soon the first token of a prompt of so many tokens can come."""
    groups: dict[tuple[int, float, bool], list[Sequence]] = defaultdict(list)
    for each in waiting:
        if each.num_outputs:  # preempted: its first token has come
            each.due_s = own_due_s(each)
        else:
            is_late = own_due_s(each) < now_s + lead_ms(each.prompt_len) / 1e3
            groups[each.request.priority, each.request.ttft_ms, is_late].append(each)
    for (_, _, is_late), members in groups.items():
        by_turn = sorted(members, key=lambda each: (each.start_tag, each.arrival))
        for each, due_s in zip(by_turn, sorted(map(own_due_s, members)), strict=True):
            each.due_s = due_s + late_s if is_late else due_s
