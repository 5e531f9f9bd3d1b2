"""Who waits and who runs."""

from __future__ import annotations

import bisect

from engine.loop.sequence import Sequence, Status


def _order(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.priority, sequence.arrival)


class Queues:
    """Sequences by status; both lists are ordered by (priority, arrival)."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """A new request, at the place its priority gives it."""
        self.by_id[sequence.request_id] = sequence
        bisect.insort(self.waiting, sequence, key=_order)

    def start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_order)
        sequence.status = Status.RUNNING

    def suspend(self, sequence: Sequence) -> None:
        """Back to waiting: preempted."""
        self.running.remove(sequence)
        bisect.insort(self.waiting, sequence, key=_order)
        sequence.status = Status.WAITING

    def finish(self, sequence: Sequence) -> None:
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.FINISHED
        del self.by_id[sequence.request_id]
