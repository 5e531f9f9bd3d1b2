"""Exporter ``otlp``: a span for each ended request, with its phases inside, to an OpenTelemetry collector.

OTLP over HTTP in JSON, without a library. A request that came with a ``traceparent`` is a span of that trace, if the
trace is sampled; one without begins its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from engine.contracts.counters import Metric
from engine.contracts.events import Event, ProxiedEvent, RequestEvent
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import OtlpConfig, read_headers
from engine_plugins.exporter.exposition import counted, page
from engine_plugins.exporter.otlp_spans import Attribute, Spans
from engine_plugins.exporter.outbox import Outbox

GATHER_S = 1.0
"""Spans of so long leave together."""
SENT = Metric("counter", "engine_otlp_requests_sent_total", "requests", "Requests whose spans were taken.")
DROPPED = Metric("counter", "engine_otlp_requests_dropped_total", "requests", "Requests whose spans were not.")


class OtlpExporter:
    """The plugin: a :class:`~engine.contracts.exporter.ScrapedExporter`, which counts what was sent and dropped."""

    def __init__(self, config: OtlpConfig, context: BuildContext) -> None:
        server = context.settings.server
        common: dict[str, Attribute] = {
            "gen_ai.provider.name": "engine",
            "server.address": server.host,
            "server.port": server.port,
        }
        spans = Spans(context.model.name, {"service.name": config.service_name}, common)
        headers = read_headers("exporter.otlp.headers_file", config.headers_file)
        self.outbox = Outbox(
            config.endpoint,
            spans.body,
            headers=headers,
            timeout_s=config.timeout_s,
            gather_s=GATHER_S,
            refused=rejected_spans,
        )
        self._model = context.model.name

    def export(self, events: Sequence[Event]) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        for event in events:
            if isinstance(event, RequestEvent | ProxiedEvent) and is_sampled(event.traceparent):
                self.outbox.put((event, offset_ns))

    def render(self) -> str:
        sent, dropped = self.outbox.sent, self.outbox.dropped
        return page((counted(SENT, sent), counted(DROPPED, dropped)), {"model": self._model})

    def close(self) -> None:
        self.outbox.close()


def is_sampled(traceparent: str) -> bool:
    """Whether whoever began the trace records it; a trace that begins here is recorded."""
    return not traceparent or bool(int(traceparent[-2:], 16) & 1)


def rejected_spans(answer: bytes) -> int:
    """Of an ``ExportTraceServiceResponse``: how many of the spans were not taken."""
    try:
        partial = msgspec.json.decode(answer)["partialSuccess"]
        return int(partial.get("rejectedSpans", 0))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return 0
