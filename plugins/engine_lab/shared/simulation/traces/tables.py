"""Traces that are tables of comma-separated values, without prompts or hashes.

``azure``: TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference traces of 2023 and later; Patel et al.,
arXiv:2311.18677). ``burstgpt``: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type, and perhaps
Session ID (Wang et al., arXiv:2401.17644).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.lines import Line


def read_azure(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    started: datetime | None = None
    for line, row in _rows(lines):
        at = _moment(line, str(line.value(row, "TIMESTAMP")))
        started = started or at
        if (at.tzinfo is None) != (started.tzinfo is None):
            line.fail(f"TIMESTAMP {at} and that of the first line: expected a time zone in both or in neither")
        since = (at - started).total_seconds()
        yield TraceRequest(since, line.tokens(row, "ContextTokens"), line.tokens(row, "GeneratedTokens"))


def read_burstgpt(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    """Failed requests, which have no response tokens, are left out."""
    for line, row in _rows(lines):
        if row.get("Response tokens") in ("0", "0.0"):
            continue
        at_s = line.seconds(row, "Timestamp")
        prompt, output = line.tokens(row, "Request tokens"), line.tokens(row, "Response tokens")
        yield TraceRequest(at_s, prompt, output, session=row.get("Session ID") or "")


def _rows(lines: Iterable[Line]) -> Iterator[tuple[Line, dict[str, str]]]:
    """The lines after the first one, which names the columns."""
    names: list[str] | None = None
    for line in lines:
        (values,) = csv.reader([line.text])
        if names is None:
            names = values
        elif len(values) != len(names):
            line.fail(f"it has {len(values)} values, expected {len(names)}: {', '.join(names)}")
        else:
            yield line, dict(zip(names, values, strict=True))


def _moment(line: Line, text: str) -> datetime:
    """The trace has seven digits of a second, sometimes with a time zone."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        line.fail(f"TIMESTAMP is {text!r}, expected a date and time as 2023-11-16 18:15:46.6805900")
