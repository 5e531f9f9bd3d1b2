"""A strict reader of the Trace Event Format: what Perfetto would drop or draw elsewhere is refused.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Perfetto counts in nanoseconds, and
slices of one track have to nest.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

FIELDS = {
    "X": {"ph", "name", "ts", "dur", "pid", "tid", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}
"""Of each phase: complete slices and metadata. Times in microseconds."""
Track = tuple[int, int]
Slice = tuple[int, int, str]
"""Start and end in nanoseconds, name."""


def read(text: bytes) -> dict[Track, list[Slice]]:
    """The slices of each track, outer ones before inner ones."""
    trace = json.loads(text, parse_constant=lambda name: refuse(f"{name} is no JSON"))
    assert trace.keys() == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert event.keys() == FIELDS[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str)
    named = Counter((e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name")
    slices: dict[Track, list[Slice]] = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        start, length = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        slices[event["pid"], event["tid"]].append((start, start + length, event["name"]))
    assert set(named.values()) == {1} and slices.keys() <= named.keys(), "a track has no name, or two"
    for found in slices.values():
        nested(found)
    return dict(slices)


def nested(found: list[Slice]) -> None:
    """In the order of the file, each begins within those that are open, and ends there."""
    open_until: list[int] = []
    last = 0
    for start, end, name in found:
        assert start >= last, f"{name} begins before the slice ahead of it"
        last = start
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{name} goes on after what it is in"
        open_until.append(end)


def nanoseconds(microseconds: Any) -> int:
    assert type(microseconds) in (int, float) and microseconds >= 0
    found = round(microseconds * 1e3)
    assert abs(microseconds * 1e3 - found) < 1e-3, f"{microseconds} us are no whole nanoseconds"
    return found


def refuse(why: str) -> None:
    raise AssertionError(why)
