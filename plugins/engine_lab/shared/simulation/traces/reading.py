"""Reading a trace of any format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.dynamo import SCHEMA, event_of, read_dynamo
from engine_lab.shared.simulation.traces.lines import Line, TraceError, lines_of
from engine_lab.shared.simulation.traces.mooncake import read_mooncake
from engine_lab.shared.simulation.traces.own import FORMAT, read_own
from engine_lab.shared.simulation.traces.sharegpt import read_sharegpt
from engine_lab.shared.simulation.traces.tables import read_azure, read_burstgpt

READERS: dict[str, Callable[[Iterable[Line]], Iterator[TraceRequest]]] = {
    "engine": read_own,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "dynamo": read_dynamo,
}
FORMATS = (*READERS, "sharegpt")


def read_trace(path: Path, format: str = "auto", limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace file, at most the first ``limit``; the first arrives at 0 s. ``format``: one of
    :data:`FORMATS`, or ``auto``, which looks at the file. Raises :class:`TraceError`."""
    name = format_of(path) if format == "auto" else format
    requests = read_sharegpt(path) if name == "sharegpt" else READERS[name](lines_of(path))
    found = list(islice(requests, limit))
    if not found:
        raise TraceError(f"{path}: no requests in it, read as --format {name}")
    started = min((request.arrival_s for request in found if not request.after), default=0.0)
    return [r if r.after or not started else replace(r, arrival_s=r.arrival_s - started) for r in found]


def format_of(path: Path) -> str:
    """Told by the first line. Raises :class:`TraceError`."""
    first = next(lines_of(path), None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    if first.text.startswith("TIMESTAMP,"):
        return "azure"
    if first.text.startswith("Timestamp,"):
        return "burstgpt"
    if first.text.startswith("["):
        return "sharegpt"
    record = first.record() if first.text.startswith("{") else {}
    if record.get("format") == FORMAT:
        return "engine"
    if event_of(record).get("schema") == SCHEMA:
        return "dynamo"
    if {"input_length", "input_tokens", "hash_ids"} & record.keys():
        return "mooncake"
    if {"type", "at_s"} <= record.keys():
        raise TraceError(f"{path}: events of exporter jsonl; exporter=[trace] exporter.trace.path=FILE records a trace")
    raise TraceError(f"{path}: of no known format; expected one of {', '.join(FORMATS)}; --format names it")


def timed_trace(path: Path, format: str, limit: int | None, rate: float | None, seed: int) -> list[TraceRequest]:
    """As :func:`read_trace`, and with ``rate`` as :func:`with_rate`. Raises :class:`TraceError`, also where there are
    neither times nor a rate."""
    trace = read_trace(path, format, limit)
    if rate is not None:
        return with_rate(trace, rate, seed)
    first = [request for request in trace if not request.after]
    if len(first) > 1 and not any(request.arrival_s for request in first):
        raise TraceError(f"--trace {path}: it has no times; expected --rate R beside it")
    return trace


def with_rate(trace: Sequence[TraceRequest], rate: float, seed: int) -> list[TraceRequest]:
    """The trace with arrivals of its own: ``rate`` a second, Poisson. Of a session, that of its first request."""
    rng, now, timed = random.Random(f"{seed}/arrivals"), 0.0, []
    for request in trace:
        timed.append(request if request.after else replace(request, arrival_s=now))
        now += 0.0 if request.after else rng.expovariate(rate)
    return timed
