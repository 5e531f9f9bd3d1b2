"""Waterfalls in the Trace Event Format, which chrome://tracing and Perfetto open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.contracts.events import StepEvent
from engine.service.waterfall import Span, Waterfall

PID, STEPS_TRACK = 1, 0


def chrome_trace(
    waterfalls: Sequence[Waterfall], steps: Callable[[float, float], Sequence[StepEvent]]
) -> dict[str, Any]:
    """One track for each sequence, and one for the engine's steps meanwhile. Times in microseconds since the first
    of the requests came in. ``steps``: the engine's steps between two moments of the events' clock."""
    first = min(waterfall.began_s for waterfall in waterfalls)
    last = max(waterfall.request.at_s for waterfall in waterfalls)
    events: list[dict[str, Any]] = [_named(STEPS_TRACK, "steps of the engine")]
    events += _steps(steps(first, last), first)
    for track, waterfall in enumerate(waterfalls, start=STEPS_TRACK + 1):
        events.append(_named(track, waterfall.request.request_id))
        events += _nested(waterfall.spans, track, (waterfall.began_s - first) * 1e3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": track, "args": {"name": name}}


def _nested(
    spans: Sequence[Span], track: int, began_ms: float, from_ns: float = 0, until_ns: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Spans as slices, which a track takes one after the other and within those that they are in: times are rounded,
    and a step ends a little after the token that it brings."""
    for span in spans:
        start_ns = min(max(from_ns, round((began_ms + span.start_ms) * 1e6)), until_ns)
        end_ns = min(max(start_ns, round((began_ms + span.start_ms + span.ms) * 1e6)), until_ns)
        yield _slice(span.name, track, start_ns, end_ns, span.detail)
        yield from _nested(span.inside, track, began_ms, start_ns, end_ns)
        from_ns = end_ns


def _slice(name: str, track: int, start_ns: float, end_ns: float, args: dict[str, Any]) -> dict[str, Any]:
    ts, dur = start_ns / 1e3, (end_ns - start_ns) / 1e3
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": PID, "tid": track, "args": args}


def _steps(steps: Sequence[StepEvent], first_s: float) -> Iterator[dict[str, Any]]:
    """Steps one after the other: one that is planned while another runs is drawn after that."""
    free_ns = 0
    for step in steps:
        ended_ns = round((step.at_s - first_s) * 1e9)
        start_ns = max(free_ns, ended_ns - round(step.duration_ms * 1e6))
        free_ns = max(start_ns, ended_ns)
        args = {
            "step": step.step,
            "num_requests": step.num_requests,
            "num_prefill_tokens": step.num_prefill_tokens,
            "num_decode_tokens": step.num_decode_tokens,
            "device_ms": round(step.device_ms, 3),
            "gap_ms": round(step.gap_ms, 3),
            "captured": step.captured,
        }
        name = "step" if step.num_prefill_tokens == 0 else "step with prompt tokens"
        yield _slice(name, STEPS_TRACK, start_ns, free_ns, args)
