"""Who waits and who runs."""

from __future__ import annotations

import bisect
from collections import Counter

from engine.loop.fair_queue import FairQueue
from engine.loop.sequence import Sequence, Status


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, sequence.start_tag, sequence.arrival)


def _most_rows(num_rows: int) -> int:
    """An eighth of the rows, at least one, is kept from the sequences of any single API request."""
    return max(1, num_rows - max(1, num_rows // 8))


class Queues:
    """Sequences by status; both lists are ordered by (priority, start_tag, arrival), which is fair between clients."""

    def __init__(self, num_rows: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self._fair = FairQueue()
        self._most_rows = _most_rows(num_rows)
        self._rows_held: Counter[str] = Counter()
        """By API request with several sequences."""

    def add(self, sequence: Sequence) -> None:
        """A new request, at the place that its priority and its start tag give it."""
        self.by_id[sequence.request_id] = sequence
        sequence.start_tag = self._fair.join(sequence.request.client)
        bisect.insort(self.waiting, sequence, key=_order)

    def admissible(self) -> list[Sequence]:
        """Those waiting that may run, in order: no API request with several sequences holds all rows."""
        held, result = self._rows_held.copy(), []
        for sequence in self.waiting:
            group = sequence.request.group
            if not group or held[group] < self._most_rows:
                held[group] += 1
                result.append(sequence)
        return result

    def start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_order)
        sequence.status = Status.RUNNING
        self._fair.started(sequence.start_tag)
        self._count_row(sequence, 1)

    def suspend(self, sequence: Sequence) -> None:
        """Back to waiting: preempted."""
        self.running.remove(sequence)
        bisect.insort(self.waiting, sequence, key=_order)
        sequence.status = Status.WAITING
        self._count_row(sequence, -1)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._count_row(sequence, -1)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._fair.leave(sequence.request.client)
        del self.by_id[sequence.request_id]

    def _count_row(self, sequence: Sequence, change: int) -> None:
        if group := sequence.request.group:
            self._rows_held[group] += change
            if not self._rows_held[group]:
                del self._rows_held[group]
