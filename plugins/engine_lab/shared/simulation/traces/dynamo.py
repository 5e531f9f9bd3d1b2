"""Dynamo's request traces, ``dynamo.request.trace.v1`` as JSONL: what its frontend saw of requests that have ended.

Requests of one ``agent_context.session_id`` follow each other: as long after the end of the one before as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.lines import Line, named

SCHEMA = "dynamo.request.trace.v1"


def event_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record, or what a sink has wrapped."""
    inner = record.get("event")
    return inner if isinstance(inner, Mapping) else record


def read_dynamo(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    """Requests by arrival: their lines come in the order in which they ended."""
    found = [(_received_s(line, event), line, event) for line, event in _ended(lines)]
    found.sort(key=lambda each: each[0])
    started = found[0][0] if found else 0.0
    last: dict[str, tuple[str, float]] = {}
    for received_s, line, event in found:
        request, replay = event["request"], line.part(event["request"], "replay")
        context = event.get("agent_context")
        session = named(context.get("session_id")) if isinstance(context, Mapping) else ""
        request_id = named(request.get("request_id")) or f"line {line.number}"
        at_s, after = received_s - started, ""
        if session in last:
            after, ended_s = last[session]
            at_s = max(0.0, received_s - ended_s)
        if session:
            last[session] = request_id, line.seconds(event, "event_time_unix_ms", unit=1e-3)
        yield TraceRequest(
            at_s,
            line.tokens(replay, "input_length"),
            line.tokens(request, "output_tokens"),
            line.hashes(replay, "input_sequence_hashes"),
            line.tokens(replay, "trace_block_size"),
            session,
            request_id,
            (after,) if after else (),
        )


def _ended(lines: Iterable[Line]) -> Iterator[tuple[Line, Mapping[str, Any]]]:
    for line in lines:
        event = event_of(line.record())
        if event.get("event_type") == "request_end":
            line.part(event, "request")
            yield line, event


def _received_s(line: Line, event: Mapping[str, Any]) -> float:
    return line.seconds(event["request"], "request_received_ms", unit=1e-3)
