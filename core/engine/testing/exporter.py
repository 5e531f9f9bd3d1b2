"""Conformance suite for exporters: any order of any events, in batches of any size, is taken without complaint.

.. code-block:: python

    class TestMine(ExporterConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import random

from engine.contracts.events import (
    DroppedEvent,
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.contracts.exporter import Exporter, ScrapedExporter
from engine.contracts.request import FinishReason

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


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
        PrefixCacheEvent(at_s, queries=10, hits=8),
        step_event(at_s),
        FirstTokenEvent(at_s, "r1", ttft_ms=20.0),
        TokensEvent(at_s, "r1", num_tokens=3, itl_ms=0.5),
        *(request_event(at_s, reason) for reason in REASONS),
        request_event(at_s, "abort", output_tokens=0, ttft_ms=0.0, tpot_ms=0.0),
        RejectedEvent(at_s, status=429, reason="queue is full"),
        RejectedEvent(at_s, status=418, reason="a status nobody expected"),
        DroppedEvent(at_s, num_events=2),
    )


class ExporterConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    def make(self) -> Exporter:
        """A fresh exporter."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def test_it_fulfils_the_contract(self) -> None:
        exporter = self.make()
        assert isinstance(exporter, Exporter)
        exporter.close()

    def test_it_takes_every_kind_of_event(self) -> None:
        exporter = self.make()
        exporter.export(one_of_each())
        exporter.close()

    def test_it_takes_events_in_any_order_and_batches_of_any_size(self) -> None:
        rng = random.Random(0)
        exporter = self.make()
        for size in (0, 1, 50, 1000):
            events = [rng.choice(one_of_each(at_s=1.0 + 0.01 * i)) for i in range(size)]
            exporter.export(events)
        exporter.close()

    def test_it_can_be_closed_without_having_seen_anything(self) -> None:
        self.make().close()

    def test_a_page_stays_bounded_whatever_ids_and_reasons_occur(self) -> None:
        exporter = self.make()
        if isinstance(exporter, ScrapedExporter):
            exporter.export(one_of_each())
            lines = exporter.render().count("\n")
            for i in range(500):
                exporter.export([FirstTokenEvent(2.0, f"r{i}", 1.0), RejectedEvent(2.0, 400 + i % 200, f"reason {i}")])
            assert exporter.render().count("\n") == lines
        exporter.close()
