"""One request of a trace: when it came, how long it was, and what it shares with others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a request when it was served. Times in milliseconds, as :class:`~engine.contracts.events.RequestEvent` has
    them; ``receive_ms``: routing included."""

    ttft_ms: float
    e2e_ms: float
    receive_ms: float = 0.0
    tokenize_ms: float = 0.0
    dispatch_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_chains: int = 0

    @property
    def deliver_ms(self) -> float:
        """From the first token in the engine until it was ready for the client."""
        before = self.receive_ms + self.tokenize_ms + self.dispatch_ms + self.queue_ms + self.prefill_ms
        return max(0.0, self.ttft_ms - before)


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
    measured: Measured | None = None
    """``None``: the trace does not say."""
