"""Where a request's time went, as one account that adds up. One clock: ``time.monotonic``, in ms here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.contracts.events import RequestEvent
from engine.contracts.request import FinishReason, Timings


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came in, and what it cost before the engine saw it."""

    received_s: float
    tokenize_ms: float


@dataclass(frozen=True, slots=True)
class Account:
    """One sequence's time. ``tokenize + queue + prefill + decode + unattributed == total``."""

    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float
    ttft_ms: float
    itl_ms: tuple[tuple[float, int], ...]
    """Per engine output after the first: time per token, and how many tokens it brought."""
    engine: Timings
    output_tokens: int

    @property
    def unattributed_ms(self) -> float:
        """Time nobody accounts for: messages between processes, detokenizing, waiting for a step to end."""
        return round(self.total_ms - self.tokenize_ms - self.queue_ms - self.prefill_ms - self.decode_ms, 3)

    @property
    def tpot_ms(self) -> float:
        later = self.output_tokens - 1
        return round((self.total_ms - self.ttft_ms) / later, 3) if later > 0 else 0.0

    def event(self, request_id: str, at_s: float, reason: FinishReason, prompt: int, limit: int) -> RequestEvent:
        """The same numbers for exporters."""
        return RequestEvent(
            at_s=at_s,
            request_id=request_id,
            finish_reason=reason,
            prompt_tokens=prompt,
            output_tokens=self.output_tokens,
            e2e_ms=self.total_ms,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            tokenize_ms=self.tokenize_ms,
            queue_ms=self.queue_ms,
            prefill_ms=self.prefill_ms,
            decode_ms=self.decode_ms,
            unattributed_ms=self.unattributed_ms,
            cached_tokens=self.engine.cached_tokens,
            drafted_tokens=self.engine.drafted_tokens,
            accepted_tokens=self.engine.accepted_tokens,
            preemptions=self.engine.preemptions,
            max_tokens=limit,
            decode_steps=self.engine.decode_steps,
            draft_chains=self.engine.draft_chains,
            draft_ms=round(self.engine.draft_ms, 3),
        )

    def public(self) -> dict[str, Any]:
        """The ``timings`` object of a response."""
        return {
            "tokenize_ms": self.tokenize_ms,
            "queue_ms": self.queue_ms,
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "unattributed_ms": self.unattributed_ms,
            "total_ms": self.total_ms,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "itl_ms": itl_summary(self.itl_ms),
            "cached_tokens": self.engine.cached_tokens,
            "drafted_tokens": self.engine.drafted_tokens,
            "accepted_tokens": self.engine.accepted_tokens,
            "preemptions": self.engine.preemptions,
            **drafting_summary(self.engine),
        }


def make_account(
    arrival: Arrival,
    engine: Timings | None,
    *,
    ended_s: float,
    first_token_s: float | None,
    itl_ms: Sequence[tuple[float, int]],
    output_tokens: int,
) -> Account:
    """``engine=None``: the sequence ended without the engine's own account; its time stays unattributed."""
    engine = engine or Timings()
    total = (ended_s - arrival.received_s) * 1e3
    ttft = 0.0 if first_token_s is None else (first_token_s - arrival.received_s) * 1e3
    return Account(
        tokenize_ms=round(arrival.tokenize_ms, 3),
        queue_ms=round(engine.queue_ms, 3),
        prefill_ms=round(engine.prefill_ms, 3),
        decode_ms=round(engine.decode_ms, 3),
        total_ms=round(total, 3),
        ttft_ms=round(ttft, 3),
        itl_ms=tuple(itl_ms),
        engine=engine,
        output_tokens=output_tokens,
    )


def drafting_summary(engine: Timings) -> dict[str, float | int]:
    """What drafting came to for one sequence, beside the counts of drafted and accepted tokens. The mean number of
    draft tokens counts steps without drafts as 0; shares and means of nothing are 0."""
    return {
        "decode_steps": engine.decode_steps,
        "draft_chains": engine.draft_chains,
        "num_draft_tokens": round(engine.drafted_tokens / max(engine.decode_steps, 1), 3),
        "draft_ms": round(engine.draft_ms, 3),
        "draft_share": round(engine.draft_ms / engine.decode_ms, 4) if engine.decode_ms > 0.0 else 0.0,
    }


def itl_summary(samples: Sequence[tuple[float, int]]) -> dict[str, float | int]:
    """Token-weighted mean, median, P95 and maximum; zeros when there was no second token."""
    count = sum(weight for _, weight in samples)
    if count == 0:
        return {"count": 0, "mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
    ordered = sorted(samples)
    return {
        "count": count,
        "mean": round(sum(value * weight for value, weight in ordered) / count, 3),
        "p50": round(_rank(ordered, 0.50 * count), 3),
        "p95": round(_rank(ordered, 0.95 * count), 3),
        "max": round(ordered[-1][0], 3),
    }


def _rank(ordered: Sequence[tuple[float, int]], position: float) -> float:
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= position:
            return value
    return ordered[-1][0]
