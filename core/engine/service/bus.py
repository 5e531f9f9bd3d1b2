"""Events on their way to exporters: bounded, off the event loop, one thread, nobody waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import structlog

from engine.contracts.events import DroppedEvent, Event
from engine.contracts.exporter import Exporter, Transcript, TranscriptExporter
from engine.plugin_guard.calls import describe_error, name_of
from engine.service.logs import Repeated

MAX_PENDING = 65536
MAX_FAILURES = 3
BATCH_PERIOD_S = 0.02
CLOSE_S = 5.0
"""How long exporters may take over the rest of the events and their end."""

T = TypeVar("T")
log = structlog.get_logger("engine.bus")


class EventBus:
    """Delivers events in batches to every exporter, in order, from one thread that alone calls exporters.

    When exporters cannot keep up, the newest events are dropped and counted. An exporter that raises three times in
    a row is cut off and reported; the others go on. One that does not return keeps the others waiting, and nobody
    else: not the event loop, not the end of the process.
    """

    def __init__(self, exporters: Sequence[Exporter], max_pending: int = MAX_PENDING) -> None:
        self._exporters = list(exporters)
        self._failures = {id(exporter): 0 for exporter in exporters}
        self._pending: deque[Event] = deque()
        self._transcripts: deque[Transcript] = deque()
        self._reads: deque[Callable[[], None]] = deque()
        self.wants_transcripts = any(isinstance(exporter, TranscriptExporter) for exporter in exporters)
        """Whether anybody looks at what :meth:`transcribe` is given."""
        self._max_pending = max_pending
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._ended = False
        self.dropped = 0
        self._dropped_reported = 0
        self._raised = {id(exporter): Repeated("exporter failed") for exporter in exporters}
        self.cut_off: list[str] = []
        """Exporters that were cut off."""
        self._thread = threading.Thread(target=self._run, name="event-bus", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Hand over events; returns at once. Call from one thread."""
        room = self._max_pending - len(self._pending)
        if len(events) > room:
            self.dropped += len(events) - max(room, 0)
            events = events[: max(room, 0)]
        self._pending.extend(events)
        if not self._wake.is_set():
            self._wake.set()

    def transcribe(self, transcript: Transcript) -> None:
        """Hand over token ids of a sequence before its :class:`RequestEvent` is published. Returns at once; drops them
        where events are dropped."""
        if len(self._pending) < self._max_pending:
            self._transcripts.append(transcript)

    def read(self, function: Callable[[], T]) -> Future[T]:
        """Have ``function`` called between two batches, after everything published so far. Returns at once; the
        future stays open while an exporter does not return."""
        future: Future[T] = Future()
        self._reads.append(partial(_fulfil, future, function))
        self._hurry.set()
        self._wake.set()
        return future

    def settled(self, function: Callable[[], T]) -> T:
        """What :meth:`read` reads. Blocks: not for the event loop."""
        return self.read(function).result()

    def report(self, exporter: Exporter, error: BaseException, call: str) -> None:
        """Log what an exporter raised. Called from the thread that calls exporters."""
        self._raised[id(exporter)].warning(error=describe_error(error, exporter, call), exc_info=error)

    def close(self) -> None:
        """Deliver what is pending and close the exporters."""
        self._ended = True
        self._hurry.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("an exporter does not return and is not closed", seconds=CLOSE_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            self._wake.wait()
            # Events arrive one by one; waiting a moment turns hundreds of wake-ups into one batch.
            self._hurry.wait(BATCH_PERIOD_S)
            self._hurry.clear()
            self._wake.clear()
            ended = self._ended
            reads = [self._reads.popleft() for _ in range(len(self._reads))]
            self._deliver()
            for read in reads:
                read()
        for exporter in tuple(self._exporters):
            self._guard(exporter, exporter.close)

    def _deliver(self) -> None:
        batch: list[Event] = []
        while self._pending:
            batch.append(self._pending.popleft())
        ended = tuple([self._transcripts.popleft() for _ in range(len(self._transcripts))])
        if self.dropped > self._dropped_reported:
            batch.append(DroppedEvent(time.monotonic(), self.dropped - self._dropped_reported))
            self._dropped_reported = self.dropped
        if not batch and not ended:
            return
        for exporter in tuple(self._exporters):
            if ended and isinstance(exporter, TranscriptExporter):
                self._guard(exporter, partial(exporter.transcripts, ended))
            if batch:
                self._guard(exporter, partial(exporter.export, tuple(batch)))

    def _guard(self, exporter: Exporter, call: Callable[[], None]) -> None:
        name = name_of(exporter)
        try:
            call()
        except (Exception, KeyboardInterrupt) as error:  # no signal comes to this thread
            # An exporter is foreign code; whatever it raises is reported and must not stop the others.
            self._failures[id(exporter)] += 1
            self.report(exporter, error, "export")
            if self._failures[id(exporter)] >= MAX_FAILURES and exporter in self._exporters:
                self._exporters.remove(exporter)
                self.cut_off.append(name)
                log.error("exporter cut off", exporter=name, failures=MAX_FAILURES)
        else:
            self._failures[id(exporter)] = 0


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # nobody waits for it any more
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
