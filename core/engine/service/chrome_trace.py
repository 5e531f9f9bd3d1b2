"""Waterfalls in the Trace Event Format, which chrome://tracing and Perfetto open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.contracts.events import DEFAULT_ENGINE, StepEvent
from engine.service.waterfall import Span, Waterfall

PID, STEPS_TRACK = 1, 0
"""Steps of further engines are on the tracks after this one."""


def chrome_trace(
    waterfalls: Sequence[Waterfall], steps: Callable[[str, float, float], Sequence[StepEvent]]
) -> dict[str, Any]:
    """One track for each sequence, and before them one for the steps meanwhile of each engine that served one. Times in
    microseconds since the first of the requests came in. ``steps``: those of an engine, by its id, between two moments
    of the events' clock."""
    first = min(waterfall.began_s for waterfall in waterfalls)
    last = max(waterfall.request.at_s for waterfall in waterfalls)
    engines = list(dict.fromkeys(waterfall.request.engine for waterfall in waterfalls))
    events: list[dict[str, Any]] = []
    for track, engine in enumerate(engines, start=STEPS_TRACK):
        events.append(_named(track, "steps of " + ("the engine" if engine == DEFAULT_ENGINE else engine)))
        events += _steps(steps(engine, first, last), first, track)
    for track, waterfall in enumerate(waterfalls, start=STEPS_TRACK + len(engines)):
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


def _steps(steps: Sequence[StepEvent], first_s: float, track: int) -> Iterator[dict[str, Any]]:
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
        yield _slice(name, track, start_ns, free_ns, args)
