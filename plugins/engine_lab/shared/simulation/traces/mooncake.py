"""Mooncake's JSONL (Qin et al., arXiv:2407.00079), and what Dynamo adds: sessions, delays and requests to wait for.

A line has ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` of blocks of 512 tokens. Lines of
one ``session_id`` follow each other: a turn is sent ``delay`` ms after the answer to the one before it, or, without a
delay, as long after it as their time stamps are apart. ``wait_for`` names requests by ``request_id``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.lines import Line, named

BLOCK_TOKENS = 512


def read_mooncake(lines: Iterable[Line], block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    last: dict[str, tuple[str, float]] = {}
    """By session: its last request, and its time stamp."""
    for line in lines:
        record = line.record()
        session = named(record.get("session_id"))
        request_id = named(record.get("request_id")) or f"line {line.number}"
        stamp = _ms(line, record, "timestamp", "created_time")
        delay = _ms(line, record, "delay", "delay_ms")
        after = line.names(record, "wait_for")
        if not after and session in last:
            before, before_s = last[session]
            after = (before,)
            delay = delay if delay is not None else max(0.0, (stamp or before_s) - before_s)
        if stamp is None and not after:
            line.fail("timestamp is missing, and the line waits for no other one")
        at_s = stamp or 0.0
        if after:
            at_s = (delay or 0.0) + (_ms(line, record, "tool_wait_ms") or 0.0)
        if session:
            last[session] = request_id, stamp or 0.0
        yield TraceRequest(
            at_s,
            line.tokens(record, "input_length", "input_tokens"),
            line.tokens(record, "output_length", "output_tokens"),
            line.hashes(record, "hash_ids"),
            block_tokens,
            session,
            request_id,
            after,
            str(record.get("policy_class") or ""),
        )


def _ms(line: Line, record: dict[str, object], *names: str) -> float | None:
    """In seconds; ``None`` where it is missing."""
    return line.seconds(record, *names, unit=1e-3) if any(record.get(name) is not None for name in names) else None
