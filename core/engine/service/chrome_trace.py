"""Waterfalls in the Trace Event Format, which chrome://tracing and Perfetto open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.contracts.events import StepEvent
from engine.service.waterfall import Span, Waterfall

PID, STEPS_TRACK = 1, 0


def chrome_trace(
    waterfalls: Sequence[Waterfall], steps: Callable[[float, float], Sequence[StepEvent]]
) -> dict[str, Any]:
    """One track for each sequence, and one for the engine's steps meanwhile. Times in microseconds since the first
    of the requests came in. ``steps`` between two moments."""
    first = min(waterfall.began_s for waterfall in waterfalls)
    last = max(waterfall.request.at_s for waterfall in waterfalls)
    events: list[dict[str, Any]] = [_named(STEPS_TRACK, "steps of the engine")]
    events += _steps(steps(first, last), first)
    for track, waterfall in enumerate(waterfalls, start=STEPS_TRACK + 1):
        events.append(_named(track, waterfall.request.request_id))
        began_us = (waterfall.began_s - first) * 1e6
        for span in waterfall.spans:
            events += _nested(span, track, began_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": track, "args": {"name": name}}


def _nested(span: Span, track: int, began_us: float) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "X",
        "name": span.name,
        "ts": round(began_us + span.start_ms * 1e3, 3),
        "dur": round(span.ms * 1e3, 3),
        "pid": PID,
        "tid": track,
        "args": span.detail,
    }
    for inside in span.inside:
        yield from _nested(inside, track, began_us)


def _steps(steps: Sequence[StepEvent], first_s: float) -> Iterator[dict[str, Any]]:
    """One behind the other: where the next one is planned while one runs, it is drawn behind that."""
    free_us = 0.0
    for step in steps:
        ended_us = (step.at_s - first_s) * 1e6
        start_us = max(free_us, ended_us - step.duration_ms * 1e3)
        free_us = max(free_us, ended_us)
        yield {
            "ph": "X",
            "name": "step" if step.num_prefill_tokens == 0 else "step with prompt tokens",
            "ts": round(start_us, 3),
            "dur": round(max(0.0, ended_us - start_us), 3),
            "pid": PID,
            "tid": STEPS_TRACK,
            "args": {
                "step": step.step,
                "num_requests": step.num_requests,
                "num_prefill_tokens": step.num_prefill_tokens,
                "num_decode_tokens": step.num_decode_tokens,
                "device_ms": round(step.device_ms, 3),
                "gap_ms": round(step.gap_ms, 3),
                "captured": step.captured,
            },
        }
