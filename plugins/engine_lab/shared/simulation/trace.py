"""One request of a trace: when it came, how long it was, and what it shares with others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Without text or token ids."""

    arrival_s: float
    """Since the start of the trace. Of a request with ``after``: since the last of those answers was
    complete."""
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    """Names of blocks of ``block_tokens`` tokens, of the prompt and, where the trace has them, of the output after it.
    Each stands for all tokens up to its end; the last block may be partial. Empty: the text shares nothing."""
    block_tokens: int = 0
    session: str = ""
    """Requests of a session follow each other."""
    request_id: str = ""
    after: tuple[str, ...] = ()
    """``request_id`` of those without whose answers this one is not sent."""
    service_class: str = ""
    """Of ``slo.classes``, if it is there."""
    priority: int = 0
    client: str = ""
