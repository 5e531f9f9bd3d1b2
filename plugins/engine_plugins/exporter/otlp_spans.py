"""Spans of ended requests in OTLP's JSON encoding: ids in hexadecimal, nanoseconds and integers as strings, enums as
numbers.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Attributes are those of the conventions for
generative AI (https://github.com/open-telemetry/semantic-conventions-genai); none of them holds text of a request.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.contracts.events import ProxiedEvent, RequestEvent

SERVER, INTERNAL = 2, 1
"""``SpanKind``."""
UNSET, ERROR = 0, 2
"""``StatusCode``."""
PHASES = ("receive", "tokenize", "route", "dispatch", "queue", "prefill", "decode", "deliver", "unattributed")
"""One after the other: what the time of a request consists of."""
OPERATIONS = {"completion": "text_completion"}
"""Requests of other kinds are chats."""

Attribute = bool | int | float | str | Sequence[str]


class Spans:
    """Makes them. ``resource`` and ``common`` are attributes of the process, and of each request's span."""

    def __init__(self, model: str, resource: Mapping[str, Attribute], common: Mapping[str, Attribute]) -> None:
        self._model, self._common = model, dict(common)
        self._resource = {"attributes": attributes(resource)}

    def body(self, events: Sequence[tuple[RequestEvent | ProxiedEvent, int]]) -> bytes:
        """An ``ExportTraceServiceRequest``. Each event comes with what to add to its clock for Unix time, in ns."""
        spans = [span for event, offset_ns in events for span in self.of(event, offset_ns)]
        scope = {"scope": {"name": "engine"}, "spans": spans}
        return msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})

    def of(self, event: RequestEvent | ProxiedEvent, offset_ns: int) -> Iterator[dict[str, Any]]:
        """The request's span, and those of its phases inside."""
        end = round(event.at_s * 1e9) + offset_ns
        asked = event.parameters if isinstance(event, RequestEvent) else None
        kind = event.kind if isinstance(event, ProxiedEvent) else asked.kind if asked else "chat"
        operation = OPERATIONS.get(kind, "chat")
        found = attributes_of(event) | {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model}
        total_ms = event.total_ms if isinstance(event, ProxiedEvent) else event.e2e_ms
        _, trace, parent, _ = event.traceparent.split("-") if event.traceparent else ("", secrets.token_hex(16), "", "")
        span: dict[str, Any] = {
            "traceId": trace,
            "spanId": event.span_id or secrets.token_hex(8),
            "name": f"{operation} {self._model}",
            "kind": SERVER,
            "startTimeUnixNano": str(end - round(total_ms * 1e6)),
            "endTimeUnixNano": str(end),
            "attributes": attributes(self._common | found),
            "status": {"code": ERROR if "error.type" in found else UNSET},
        }
        yield span | ({"parentSpanId": parent} if parent else {})
        if isinstance(event, RequestEvent):
            yield from _phases(event, span)


def _phases(event: RequestEvent, span: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    at, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    for name in PHASES:
        # Times are rounded: the last phase may not outlast the request.
        until = min(end, at + max(0, round(getattr(event, f"{name}_ms") * 1e6)))
        if until > at:
            yield {
                "traceId": span["traceId"],
                "spanId": secrets.token_hex(8),
                "parentSpanId": span["spanId"],
                "name": name,
                "kind": INTERNAL,
                "startTimeUnixNano": str(at),
                "endTimeUnixNano": str(until),
                "status": {"code": UNSET},
            }
        at = until


def attributes_of(event: RequestEvent | ProxiedEvent) -> dict[str, Attribute]:
    """What the event says of its request."""
    api_id = event.request_id if isinstance(event, ProxiedEvent) else event.request_id.rpartition("-")[0]
    found: dict[str, Attribute] = {"gen_ai.response.id": api_id or event.request_id}
    if isinstance(event, ProxiedEvent):
        failed = {"error.type": str(event.status)} if event.status >= 500 else {}
        return found | {"engine.proxied_to": event.server, "http.response.status_code": event.status} | failed
    found |= {
        "gen_ai.request.max_tokens": event.max_tokens,
        "gen_ai.response.finish_reasons": [event.finish_reason],
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.output_tokens": event.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "engine.id": event.engine,
        "engine.drafted_tokens": event.drafted_tokens,
        "engine.accepted_tokens": event.accepted_tokens,
        "engine.preemptions": event.preemptions,
    }
    if event.output_tokens:
        found["gen_ai.response.time_to_first_chunk"] = event.ttft_ms / 1e3
    if event.finish_reason == "error":
        found["error.type"] = "engine_failed"
    if (asked := event.parameters) is not None:
        found |= {
            "gen_ai.request.stream": asked.stream,
            "gen_ai.request.choice.count": asked.num_choices,
            "gen_ai.request.temperature": float(asked.temperature),
            "gen_ai.request.top_p": float(asked.top_p),
        }
        found |= {"gen_ai.request.top_k": asked.top_k} if asked.top_k else {}
        found |= {"gen_ai.request.seed": asked.seed} if asked.seed is not None else {}
    return found


def attributes(values: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    """``KeyValue`` messages."""
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: Attribute) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [{"stringValue": text} for text in value]}}
