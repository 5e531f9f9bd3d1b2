"""Who waits and who runs."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable

from engine.loop.due_times import assign, own_due_s
from engine.loop.fair_queue import FairQueue
from engine.loop.sequence import Sequence, Status

OUTPUT_COST = 2
"""An output token costs its client so many prompt tokens (Sheng et al., OSDI 2024)."""


def _order(sequence: Sequence) -> tuple[int, float, int, int]:
    return (sequence.request.priority, sequence.due_s, sequence.start_tag, sequence.arrival)


def _most_rows(num_rows: int) -> int:
    """An eighth of the rows, at least one, is kept from the sequences of any single API request."""
    return max(1, num_rows - max(1, num_rows // 8))


class Queues:
    """Sequences by status; both lists are ordered by (priority, due_s, start_tag, arrival), which is fair between
    clients."""

    def __init__(self, num_rows: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self.has_ttft_targets = False
        self.has_itl_targets = False
        """Some request has had one of its own."""
        self._fair = FairQueue()
        self._most_rows = _most_rows(num_rows)
        self._rows_held: Counter[str] = Counter()
        """By API request with several sequences."""

    def add(self, sequence: Sequence) -> None:
        """A new request, at the place that its priority, its due time and its start tag give it."""
        self.by_id[sequence.request_id] = sequence
        self.has_ttft_targets = self.has_ttft_targets or sequence.request.ttft_ms > 0
        self.has_itl_targets = self.has_itl_targets or sequence.request.itl_ms > 0
        begun = bool(sequence.request.output)  # its client waits for the next token: as after a preemption, it is first
        tag = self._fair.join(sequence.request.client, 0 if begun else sequence.prompt_len)
        sequence.start_tag = 0 if begun else tag
        sequence.due_s = own_due_s(sequence)
        bisect.insort(self.waiting, sequence, key=_order)

    @property
    def waits_for_due_times(self) -> bool:
        return bool(self.waiting) and self.waiting[-1].due_s > 0

    def sort_by_due(self, now_s: float, late_s: float, lead_ms: Callable[[int], float]) -> None:
        """Order those that wait by the due times of this moment; see :func:`engine.loop.due_times.assign`."""
        if self.waits_for_due_times:
            assign(self.waiting, now_s, late_s, lead_ms)
            self.waiting.sort(key=_order)

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
        self._fair.leave(sequence.request.client, OUTPUT_COST * (sequence.num_outputs - len(sequence.request.output)))
        del self.by_id[sequence.request_id]

    def _count_row(self, sequence: Sequence, change: int) -> None:
        if group := sequence.request.group:
            self._rows_held[group] += change
            if not self._rows_held[group]:
                del self._rows_held[group]
