"""A strict decoder of OTLP's JSON encoding of traces: it refuses whatever the specification does not allow.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

VALUES = {
    "stringValue": str, "boolValue": bool, "doubleValue": float, "intValue": str, "arrayValue": dict,
}  # fmt: skip
INT64 = re.compile(r"-?\d{1,19}")
HEX = {"traceId": 32, "spanId": 16, "parentSpanId": 16}


@dataclass(frozen=True)
class Span:
    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: int


def decoded(body: bytes) -> tuple[dict[str, Any], list[Span]]:
    """Attributes of the resource, and its spans. Spans of one body are linked and lie in their parents."""
    (resource_spans,) = only(msgspec.json.decode(body), "resourceSpans")["resourceSpans"]
    (scope_spans,) = only(resource_spans, "resource", "scopeSpans")["scopeSpans"]
    assert only(scope_spans, "scope", "spans")["scope"]["name"]
    spans = [span_of(span) for span in scope_spans["spans"]]
    known = {(span.trace, span.id): span for span in spans}
    assert len(known) == len(spans), "two spans have one id"
    for span in spans:
        parent = known.get((span.trace, span.parent))
        assert parent is None or parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
    return values_of(resource_spans["resource"]["attributes"]), spans


def span_of(given: dict[str, Any]) -> Span:
    only(given, "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "attributes", "status", *HEX)
    for name, digits in HEX.items():
        if name in given:
            assert re.fullmatch(rf"[0-9a-f]{{{digits}}}", given[name]) and int(given[name], 16), f"{name} is no id"
    start, end = (uint64(given[name]) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    assert start <= end and type(given["kind"]) is int and 1 <= given["kind"] <= 5
    code = only(given["status"], "code", "message")["code"]
    assert type(code) is int and code in (0, 1, 2)
    assert given["name"] and given["traceId"] and given["spanId"]
    found = values_of(given.get("attributes", []))
    parent = given.get("parentSpanId", "")
    return Span(given["traceId"], given["spanId"], parent, given["name"], given["kind"], start, end, found, code)


def uint64(text: Any) -> int:
    assert isinstance(text, str) and re.fullmatch(r"\d{1,20}", text), f"{text!r} is no 64-bit number as a string"
    return int(text)


def values_of(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    names = [only(attribute, "key", "value")["key"] for attribute in attributes]
    assert len(set(names)) == len(names) and all(names), "a key occurs twice"
    return {attribute["key"]: value_of(attribute["value"]) for attribute in attributes}


def value_of(value: dict[str, Any]) -> Any:
    ((kind, found),) = value.items()
    assert type(found) is VALUES[kind], f"{kind} holds {found!r}"
    if kind == "intValue":
        assert INT64.fullmatch(found)
        return int(found)
    return [value_of(item) for item in only(found, "values")["values"]] if kind == "arrayValue" else found


def only(given: dict[str, Any], *names: str) -> dict[str, Any]:
    assert given.keys() <= set(names), f"{given.keys() - set(names)} are no fields"
    return given
