"""Conformance suite for exporters: any order of any events, in batches of any size, is taken without complaint.

.. code-block:: python

    class TestMine(ExporterConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

from engine.contracts.events import (
    AdmittedEvent,
    BatchEvent,
    DroppedEvent,
    Event,
    FirstTokenEvent,
    OwnRequestEvent,
    PreemptedEvent,
    PrefixCacheEvent,
    ProxiedEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    StoredAnswersEvent,
    TokensEvent,
)
from engine.contracts.exporter import CountersExporter, Exporter, ScrapedExporter
from engine.contracts.request import FinishReason
from engine.contracts.router import AnswerTally
from engine.counters.engine import EngineCounters
from engine.plugin_guard.calls import lacking
from engine.testing.subject import Subject, Suite, filled

SAMPLE = re.compile(
    r"(?P<series>[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_][a-zA-Z0-9_]*=\"([^\"\\\n]|\\[\\\"n])*\",?)*\})?)"
    r" (?P<value>[+-]?Inf|NaN|[+-]?[0-9.eE+-]+)( [0-9]+)?"
)
"""A line of the Prometheus text format that is no comment."""
REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

MOST_DRAFTS = 8
"""Of one request in one step, in these events."""


def step_event(at_s: float = 1.0, **changes: float) -> StepEvent:
    fields: dict[str, float] = {
        "step": 1,
        "duration_ms": 4.0,
        "host_ms": 0.5,
        "device_ms": 3.0,
        "num_requests": 3,
        "num_prefill_tokens": 10,
        "num_decode_tokens": 2,
        "running": 3,
        "waiting": 1,
        "kv_used": 0.25,
        **changes,
    }
    return StepEvent(at_s=at_s, **fields)  # type: ignore[arg-type]


def request_event(at_s: float = 1.0, finish_reason: FinishReason = "stop", **changes: float) -> RequestEvent:
    fields: dict[str, float] = {
        "prompt_tokens": 10,
        "output_tokens": 5,
        "e2e_ms": 60.0,
        "ttft_ms": 20.0,
        "tpot_ms": 10.0,
        "tokenize_ms": 1.0,
        "queue_ms": 4.0,
        "prefill_ms": 14.0,
        "decode_ms": 40.0,
        "unattributed_ms": 1.0,
        "cached_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        **changes,
    }
    return RequestEvent(at_s=at_s, request_id="r1", finish_reason=finish_reason, **fields)  # type: ignore[arg-type]


def one_of_each(at_s: float = 1.0) -> tuple[Event, ...]:
    """Every kind of event, and every way a request ends."""
    return (
        AdmittedEvent(at_s, "r1", waited_ms=4.0, cached_tokens=8),
        PrefixCacheEvent(at_s, queries=10, hits=8),
        step_event(at_s),
        PreemptedEvent(at_s, "r1", lost_tokens=10, by="r2"),
        FirstTokenEvent(at_s, "r1", ttft_ms=20.0),
        TokensEvent(at_s, "r1", num_tokens=3, itl_ms=0.5),
        *(request_event(at_s, reason) for reason in REASONS),
        request_event(at_s, "abort", output_tokens=0, ttft_ms=0.0, tpot_ms=0.0),
        ProxiedEvent(at_s, "r3", "chat", "127.0.0.1:8001", status=200, total_ms=50.0),
        OwnRequestEvent(at_s, "r3", "shadow", "agrees", "auto", "small", "127.0.0.1:8001"),
        RejectedEvent(at_s, status=429, reason="queue is full"),
        RejectedEvent(at_s, status=418, reason="a status nobody expected"),
        StoredAnswersEvent(at_s, AnswerTally(3, 2, misses=5, audits=4, false_hits=1, false_rate=(0.05, 0.7))),
        BatchEvent(at_s, completed=3, failed=1, waiting=5, paused=False),
        DroppedEvent(at_s, num_events=2),
    )


def nothing_happened(at_s: float = 1.0) -> tuple[Event, ...]:
    """Events of an engine in which nothing took any time: numbers that somebody may divide by."""
    times = dict.fromkeys(
        ("e2e_ms", "ttft_ms", "tpot_ms", "tokenize_ms", "queue_ms", "prefill_ms", "decode_ms", "unattributed_ms"), 0.0
    )
    step = dict.fromkeys(("duration_ms", "host_ms", "device_ms", "kv_used"), 0.0)
    counts = dict.fromkeys(("num_requests", "num_prefill_tokens", "num_decode_tokens", "running", "waiting"), 0)
    return (
        step_event(at_s, **step, **counts),
        AdmittedEvent(at_s, "r1", waited_ms=0.0, cached_tokens=0),
        PrefixCacheEvent(at_s, queries=0, hits=0),
        FirstTokenEvent(at_s, "r1", ttft_ms=0.0),
        TokensEvent(at_s, "r1", num_tokens=1, itl_ms=0.0),
        request_event(at_s, "length", prompt_tokens=1, output_tokens=0, **times),
        StoredAnswersEvent(at_s, AnswerTally()),
        DroppedEvent(at_s, num_events=0),
    )


class Fed:
    """An exporter as the engine feeds it: its counters know each event before the exporter does."""

    def __init__(self, exporter: Exporter, max_draft_tokens: int = MOST_DRAFTS) -> None:
        self.exporter = exporter
        counters = EngineCounters(max_draft_tokens, classes=("chat",))
        self._count = counters.add
        if isinstance(exporter, CountersExporter):
            exporter.watch(counters.readings)

    def export(self, events: Sequence[Event]) -> None:
        self._count(events)
        self.exporter.export(events)

    def close(self) -> None:
        self.exporter.close()

    @property
    def is_scraped(self) -> bool:
        return isinstance(self.exporter, ScrapedExporter)

    def render(self) -> str:
        assert isinstance(self.exporter, ScrapedExporter)
        return self.exporter.render()


class ExporterConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    def make(self) -> Exporter:
        """A fresh exporter."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def fed(self) -> Fed:
        return Fed(self.make())

    def written(self, exporter: Exporter) -> object:
        """What the exporter has made of its events so far, to compare with another's: the page of one that is scraped.
        Override it for what goes elsewhere: a file's text, what a client was sent."""
        return exporter.render() if isinstance(exporter, ScrapedExporter) else None

    def test_it_fulfils_the_contract(self) -> None:
        exporter = self.make()
        assert isinstance(exporter, Exporter), lacking(exporter, Exporter)
        exporter.close()

    def test_it_takes_every_kind_of_event(self) -> None:
        exporter = self.fed()
        exporter.export(one_of_each())
        exporter.close()

    def test_it_takes_events_in_any_order_and_batches_of_any_size(self) -> None:
        rng = random.Random(0)
        exporter = self.fed()
        for size in (0, 1, 50, 1000):
            events = [rng.choice(one_of_each(at_s=1.0 + 0.01 * i)) for i in range(size)]
            exporter.export(events)
        exporter.close()

    def test_it_takes_events_of_which_every_number_is_zero(self) -> None:
        exporter = self.fed()
        exporter.export(nothing_happened())
        exporter.export(one_of_each())
        exporter.export(nothing_happened(2.0))
        exporter.close()

    def test_it_can_be_closed_without_having_seen_anything(self) -> None:
        self.make().close()

    def test_other_exporters_get_the_same_batch(self) -> None:
        """A batch is one list for all exporters: each leaves it as it was."""
        exporter = self.fed()
        for events in (one_of_each(), nothing_happened(), one_of_each()[::-1]):
            batch = list(events)
            exporter.export(batch)
            assert batch == list(events), "the batch was changed"
        exporter.close()

    def test_one_batch_or_many_come_to_the_same(self) -> None:
        events = [*one_of_each(), *nothing_happened(), *one_of_each()]
        at_once, one_by_one = self.fed(), self.fed()
        at_once.export(events)
        for event in events:
            one_by_one.export((event,))
        for exporter in (at_once, one_by_one):
            exporter.close()
        assert self.written(at_once.exporter) == self.written(one_by_one.exporter)

    def test_a_page_stays_bounded_whatever_ids_and_reasons_occur(self) -> None:
        exporter = self.fed()
        if exporter.is_scraped:
            exporter.export(one_of_each())
            lines = exporter.render().count("\n")
            for i in range(500):
                exporter.export([FirstTokenEvent(2.0, f"r{i}", 1.0), RejectedEvent(2.0, 400 + i % 200, f"reason {i}")])
                exporter.export([TokensEvent(2.0, f"r{i}", 1 + i, 0.1 * i), step_event(2.0, step=i, running=i)])
                exporter.export([msgspec.structs.replace(request_event(2.0), request_id=f"r{i}", output_tokens=i)])
            assert exporter.render().count("\n") == lines
        exporter.close()

    def test_a_page_is_prometheus_text_at_any_time(self) -> None:
        """Before the first event, too; each series once."""
        exporter = self.fed()
        if exporter.is_scraped:
            for events in (
                (),
                nothing_happened(),
                one_of_each(),
                [RejectedEvent(3.0, 429, 'a "reason"\nof two lines')],
            ):
                exporter.export(list(events))
                page = exporter.render()
                assert not page or page.endswith("\n"), "the last line does not end"
                lines = [line for line in page.splitlines() if line and not line.startswith("#")]
                found = [SAMPLE.fullmatch(line) for line in lines]
                wrong = [line for line, match in zip(lines, found, strict=True) if match is None]
                assert not wrong, f"no Prometheus text: {wrong[0]!r}"
                series = [match["series"] for match in found if match is not None]
                assert len(set(series)) == len(series), "a series occurs twice"
        exporter.close()

    def test_a_page_that_is_read_again_is_the_same(self) -> None:
        """Anybody may scrape, at any time: counters count from the start, not from the last reader."""
        exporter = self.fed()
        if exporter.is_scraped:
            exporter.export(one_of_each())
            first = exporter.render()
            assert exporter.render() == first
            read, unread = self.fed(), self.fed()
            for other in (read, unread):
                other.export(one_of_each())
                if other is read:
                    other.render()
                other.export(one_of_each(2.0))
                other.close()
            assert self.written(read.exporter) == self.written(unread.exporter)
        exporter.close()


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [ExporterConformance], make=lambda self: subject.build())
