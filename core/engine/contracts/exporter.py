"""Slot ``exporter``: where do events go? Any number of exporters; none is on the step path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.contracts.counters import Reading
from engine.contracts.events import Event


@dataclass(frozen=True, slots=True)
class Transcript:
    """The token ids of a sequence that has ended."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    cache_salt: str
    """The tenant: texts of different ones share nothing."""


@runtime_checkable
class Exporter(Protocol):
    """The plugin; lives in the API process. One that raises three times in a row is cut off and reported."""

    def export(self, events: Sequence[Event]) -> None:
        """Take a batch of events, in order. Called from one thread that no request waits for, as are the other methods;
        never concurrently. Others get the same batch: it may not be changed."""
        ...

    def close(self) -> None:
        """No further events come; flush."""
        ...


@runtime_checkable
class ScrapedExporter(Exporter, Protocol):
    """An exporter whose state is read over HTTP: its page is served at ``/metrics``."""

    def render(self) -> str:
        """The page, in the Prometheus text format."""
        ...


@runtime_checkable
class CountersExporter(Exporter, Protocol):
    """An exporter that renders or sends the engine's counters."""

    def watch(self, readings: Callable[[], Sequence[Reading]]) -> None:
        """Called once, before the first batch. ``readings`` says what the counters are at the moment
        (:mod:`engine.counters`); any thread may call it."""
        ...


@runtime_checkable
class TranscriptExporter(Exporter, Protocol):
    """An exporter that looks at token ids, which are in no event."""

    def transcripts(self, ended: Sequence[Transcript]) -> None:
        """Take those of sequences whose :class:`~engine.contracts.events.RequestEvent` follows, in the next batch or a
        later one, or was dropped."""
        ...
