"""What was observed of one request, and the latencies that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.percentiles import Sample, percentiles


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculative decoding came to for one request, in the server's own words (``timings``)."""

    drafted: int
    accepted: int
    chains: int
    """Model passes in which drafts were verified."""
    draft_ms: float
    decode_ms: float
    """From the first output token to the last, time in the drafter included."""


@dataclass(frozen=True, slots=True)
class Served:
    """Which of several engines of the server served a request, in its own words (``timings.route``)."""

    engine: str
    attempt: int
    """Engines that were sent it."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds of the client's monotonic clock.

    ``scheduled_s`` is when the request was due: its arrival time in an open loop, the end of the previous
    request of its connection in a closed one. All latencies count from there, so waiting caused by the
    client or by a full server is never lost.
    """

    index: int
    scheduled_s: float
    sent_s: float
    done_s: float
    """The last piece of the stream, or the failure."""
    chunks_s: tuple[float, ...] = ()
    """Arrival of every chunk with output text."""
    end_s: float = 0.0
    """Arrival of the last chunk with text or a finish reason."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """``None``: the server does not say."""
    finish_reason: str | None = None
    error: str = ""
    """Kind of failure, for example ``http_429``; empty when the stream ended as it should."""
    detail: str = ""
    text: str = ""
    """The output, kept only when the client has to count its tokens."""
    chunk_tokens: tuple[int, ...] = ()
    """Output tokens so far at each of ``chunks_s``, where the server says so in every chunk; else empty."""
    drafting: Drafting | None = None
    """``None``: the server does not say."""
    served: Served | None = None
    """``None``: the server has one engine, or does not say."""
    service_class: str = ""
    """Of a mixture."""
    turn: int = 0
    """Of its session, from 0 on."""
    held_s: float = 0.0
    """How long a limit of running requests kept it from being sent."""
    left: bool = False
    """The client went away before the answer ended, as the workload has it."""

    @property
    def ok(self) -> bool:
        """Whether the answer came to its end."""
        return not self.error and not self.left

    @property
    def late_s(self) -> float:
        """How long after it was due the client sent it, less what a limit held it back."""
        return max(0.0, self.sent_s - self.scheduled_s - self.held_s)

    @property
    def ttft_ms(self) -> float | None:
        """Due until the first output text."""
        return (self.chunks_s[0] - self.scheduled_s) * 1e3 if self.chunks_s else None

    @property
    def e2e_ms(self) -> float:
        """Due until the end of the output."""
        return ((self.end_s or self.done_s) - self.scheduled_s) * 1e3

    @property
    def decode_ms(self) -> float:
        """First output text until the end of the output."""
        return ((self.end_s or self.done_s) - self.chunks_s[0]) * 1e3 if self.chunks_s else 0.0

    @property
    def tpot_ms(self) -> float | None:
        """Decode window divided by the tokens generated in it."""
        if self.output_tokens is None or self.output_tokens < 2 or not self.chunks_s:
            return None
        return self.decode_ms / (self.output_tokens - 1)

    @property
    def inter_chunk_ms(self) -> tuple[float, ...]:
        """Gaps between chunks: what a reader of the stream sees, however many tokens a chunk carries."""
        return tuple((b - a) * 1e3 for a, b in zip(self.chunks_s, self.chunks_s[1:]))

    @property
    def itl_samples(self) -> tuple[Sample, ...]:
        """Gaps between tokens: each gap between chunks, divided by the tokens of the chunk that ended it, where chunks
        say how many they carry; else by this request's mean tokens per chunk.

        Exact for servers that send a token a chunk, too. Otherwise a gap is spread evenly over the mean.
        """
        gaps = self.inter_chunk_ms
        if self.output_tokens is None or self.output_tokens < 2 or not gaps:
            return ()
        if self.chunk_tokens:
            carried = [max(1, b - a) for a, b in zip(self.chunk_tokens, self.chunk_tokens[1:])]
            return tuple((gap / tokens, tokens) for gap, tokens in zip(gaps, carried, strict=True))
        per_chunk = max(1.0, (self.output_tokens - 1) / len(gaps))
        return tuple((gap / per_chunk, max(1, round(per_chunk))) for gap in gaps)

    def slo_value(self, name: str) -> float | None:
        """The value an objective is compared with, in ms; ``None`` when this request has none (one token)."""
        if name == "itl":
            samples = self.itl_samples
            return percentiles(samples, (99,))[0] if samples else None
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}[name]
