"""How far each rank is, for those whose library does not say who is missing: kept in a store that all ranks reach."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.contracts.communicator import CommunicatorError, World

MOST_BEAT_S = 0.5
BEATS = 16
"""So many at least in the time that a call may take."""
VERDICT = 0.25
"""Share of that time for finding out who is missing: some beats."""
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself."""

    number: int
    begun: int
    """Calls."""
    entered: dict[str, int]
    """Calls by place."""


class Beats:
    """Tells ``store``, in a thread, how far this rank is; and finds out of the others what they tell."""

    def __init__(self, world: World, store: Any) -> None:
        self._world, self._store = world, store
        self._begun, self._entered = 0, dict[str, int]()
        self._every_s = min(MOST_BEAT_S, world.timeout_s / BEATS)
        self._closed = threading.Event()
        self._tell(0)
        self._thread = threading.Thread(target=self._run, name="communicator beats", daemon=True)
        self._thread.start()

    def enter(self, begun: int, place: str) -> int:
        """A call begins: the number that it has at its place, a group or a pair of ranks."""
        self._begun = begun
        number = self._entered[place] = self._entered.get(place, 0) + 1
        return number

    def failure(self, entered: str, place: str, ranks: Sequence[int], reason: str) -> CommunicatorError:
        """What to say of this rank's call at ``place``, for which it needs ``ranks``: which of them are missing.

        Takes some beats. ``entered``: ``rank 0 entered all_reduce of group tp (call 5)``.
        """
        found: list[CommunicatorError] = []
        number = self._entered[place]

        def ask() -> None:
            with suppress(RuntimeError, ValueError):
                found.append(self._judge(entered, place, number, ranks, reason))

        # Of a rank 0 that is stopped no answer ever comes.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(VERDICT * self._world.timeout_s)
        return found[0] if found else CommunicatorError(f"{entered}, {reason}; rank 0 does not answer", [0])

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(self._every_s):
            number += 1
            try:
                self._tell(number)
            except RuntimeError:  # the store is gone: a call that needs its rank ends in an error of its own
                return

    def _tell(self, number: int) -> None:
        said = json.dumps([number, self._begun, self._entered])
        self._store.set(f"beat {self._world.rank}", said)

    def _judge(self, entered: str, place: str, number: int, ranks: Sequence[int], reason: str) -> CommunicatorError:
        others = [rank for rank in ranks if rank != self._world.rank]
        before = {rank: self._beat_of(rank) for rank in others}
        time.sleep(3 * self._every_s)
        if self._store.check([FAILED]):
            by, text, missing = json.loads(self._store.get(FAILED))
            if by != self._world.rank:
                return CommunicatorError(f"rank {by} gave up: {text}", missing)
        seen = {}
        for rank in others:
            beat = self._beat_of(rank)
            at = f"call {beat.begun}" if beat.begun else "no call"
            if beat.number == before[rank].number:
                seen[rank] = f"rank {rank} is silent, it was at {at}"
            elif beat.entered.get(place, 0) < number:
                seen[rank] = f"rank {rank} is at {at}"
        error = CommunicatorError("; ".join([f"{entered}, {reason}", *seen.values()]), sorted(seen))
        self._store.compare_set(FAILED, "", json.dumps([self._world.rank, str(error), error.ranks]))
        return error

    def _beat_of(self, rank: int) -> Beat:
        key = f"beat {rank}"
        return Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else Beat(0, 0, {})
