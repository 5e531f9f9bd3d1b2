"""This engine's own traces, as exporter ``trace`` writes them: JSONL, a first line that says how blocks were hashed.

A line without ``prompt_tokens`` begins a part, written by another run of the server: ``started`` is its start as Unix
time, and its hashes have a salt of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from engine_lab.shared.simulation.trace import Measured, TraceRequest
from engine_lab.shared.simulation.traces.lines import Line

FORMAT = "engine.trace.v1"


def read_own(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    started = first = block_tokens = None
    for line in lines:
        record = line.record()
        if record.get("format") == FORMAT:
            started, block_tokens = line.seconds(record, "started"), line.tokens(record, "block_tokens")
            first = started if first is None else first
            continue
        if started is None or first is None or block_tokens is None:
            line.fail(f'expected a line with "format": "{FORMAT}" before it')
        yield TraceRequest(
            line.seconds(record, "arrival_s") + max(0.0, started - first),
            line.tokens(record, "prompt_tokens"),
            line.tokens(record, "output_tokens"),
            line.hashes(record, "block_hashes"),
            block_tokens,
            request_id=str(record.get("request_id") or ""),
            measured=_measured(line, record),
        )


def _measured(line: Line, record: dict[str, Any]) -> Measured | None:
    """``None``: an older version has written it."""
    if record.get("measured") is None:
        return None
    try:
        return msgspec.convert(record["measured"], Measured)
    except msgspec.ValidationError as error:
        line.fail(f"measured: {error}")
