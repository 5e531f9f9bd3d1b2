"""Records that plans copy into the blocks of a lease, and how many of them a step copies while others decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from engine.step.plan import RecordMove

MOST_SHARE = 0.1
"""Of a decode step: how much longer it may take because records are copied before it."""
LEAST_BYTES = 2**18
"""That it copies whatever it takes, so that loads progress."""
FIRST_RATE = 2e9
"""Bytes a second that are believed to be copied before that was measured."""
FORGET = 0.7
"""Weight that copies keep when the next one comes."""


class LoadBound:
    """How much may be copied before a step, so that rows that decode hardly feel it."""

    def __init__(self, num_bytes: Sequence[int]) -> None:
        """``num_bytes``: of a record, by group."""
        self._num_bytes = tuple(num_bytes)
        self._copied, self._took_ms = FIRST_RATE / 1e3, 1.0
        """Bytes of recent copies, and what they took."""

    def most_bytes(self, step_ms: float) -> float:
        """Of records, before a step that takes so long."""
        return max(LEAST_BYTES, MOST_SHARE * step_ms * self._copied / self._took_ms)

    def observe(self, moves: Sequence[RecordMove], ms: float) -> None:
        """A step has copied records, which took ``ms`` milliseconds."""
        if ms > 0.0:
            num_bytes = sum([len(move.slots) * self._num_bytes[move.group] for move in moves])
            self._copied, self._took_ms = FORGET * self._copied + num_bytes, FORGET * self._took_ms + ms


class Fill:
    """The records that a lease waits for, which are held until they were copied."""

    def __init__(
        self, moves: Sequence[RecordMove], num_bytes: Sequence[int], let_go: Callable[[Sequence[RecordMove]], None]
    ) -> None:
        """``num_bytes``: of a record, by group; ``let_go`` ends the holds on the records of moves."""
        self.moves = tuple(moves)
        """Those that no plan has yet."""
        self._num_bytes = tuple(num_bytes)
        self._let_go = let_go

    @property
    def num_bytes(self) -> int:
        """That no plan copies yet."""
        return sum([len(move.slots) * self._num_bytes[move.group] for move in self.moves])

    def take(self, most_bytes: float = math.inf) -> tuple[tuple[RecordMove, ...], Callable[[], None]]:
        """Records for a plan to copy, at most of so many bytes or one, and what is to be called when it has."""
        taken, left = list[RecordMove](), list[RecordMove]()
        for move in self.moves:
            size = self._num_bytes[move.group]
            count = int(min(len(move.slots), max(most_bytes // size, not taken))) if not left else 0
            most_bytes -= count * size
            if count:
                taken.append(RecordMove(move.group, move.blocks[:count], move.slots[:count]))
            if count < len(move.slots):
                left.append(RecordMove(move.group, move.blocks[count:], move.slots[count:]))
        self.moves = tuple(left)
        return tuple(taken), partial(self._let_go, taken)

    def give_up(self) -> None:
        """No plan copies the rest."""
        self._let_go(self.moves)
        self.moves = ()
