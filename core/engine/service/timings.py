"""Where a request's time went, as one account that adds up. One clock: ``time.monotonic``, in ms here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.contracts.events import RequestEvent, RequestParameters
from engine.contracts.percentiles import Sample, describe
from engine.contracts.request import FinishReason, StagedTokens, Timings
from engine.service.promises import Promise
from engine.service.trace_context import NO_TRACE, TraceContext


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came in, and what it cost before it was routed."""

    received_s: float
    receive_ms: float
    """Reading and parsing the body."""
    tokenize_ms: float
    """Admission, chat template and tokenizer, waiting for them included."""
    trace: TraceContext = NO_TRACE


SPANS = ("receive", "tokenize", "route", "dispatch", "queue", "prefill", "decode", "deliver")
"""Spans that the time of a sequence consists of, one after the other."""


@dataclass(frozen=True, slots=True)
class Account:
    """One sequence's time. The spans and ``unattributed_ms`` add up to ``total_ms``."""

    receive_ms: float
    tokenize_ms: float
    route_ms: float
    dispatch_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    deliver_ms: float
    total_ms: float
    ttft_ms: float
    itl_ms: tuple[tuple[float, int], ...]
    """For each output of the engine after the first: ms per token, and how many tokens it brought."""
    engine: Timings
    prompt_tokens: int
    output_tokens: int
    detokenize_ms: float = 0.0
    ttfo_ms: float = 0.0
    """Until the first text or call that is no thought was there; 0: there was none."""
    route: Mapping[str, str | int] = field(default_factory=dict)
    """Which of several engines served the sequence, how many were sent it, and why the first of them was."""
    promise: Promise | None = None
    """Of its class."""
    expected_ttft_ms: float | None = None

    def spans(self) -> dict[str, float]:
        """Milliseconds of each span, by name, in order."""
        return {name: getattr(self, f"{name}_ms") for name in SPANS}

    @property
    def unattributed_ms(self) -> float:
        """Milliseconds that no span accounts for."""
        return round(self.total_ms - sum(self.spans().values()), 3)

    @property
    def tpot_ms(self) -> float:
        later = self.output_tokens - 1
        return round((self.total_ms - self.ttft_ms) / later, 3) if later > 0 else 0.0

    def event(
        self,
        request_id: str,
        at_s: float,
        reason: FinishReason,
        limit: int,
        write: Written,
        trace: TraceContext,
        parameters: RequestParameters | None,
        engine: str,
    ) -> RequestEvent:
        """The account as an event for exporters. ``engine``: the id of the engine that the sequence ran on."""
        return RequestEvent(
            at_s=at_s,
            request_id=request_id,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
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
            receive_ms=self.receive_ms,
            route_ms=self.route_ms,
            dispatch_ms=self.dispatch_ms,
            deliver_ms=self.deliver_ms,
            detokenize_ms=self.detokenize_ms,
            write_ms=round(write.ms, 3),
            last_write_ms=round(write.last_ms, 3),
            unread_ms=round(write.unread_ms, 3),
            traceparent=trace.parent,
            span_id=trace.span_id,
            parameters=parameters,
            engine=engine,
            ttfo_ms=self.ttfo_ms,
            attempts=int(self.route.get("attempt", 1)),
            slo_class="" if self.promise is None else self.promise.name,
            ttft_target_ms=0.0 if self.promise is None else self.promise.slo.ttft_ms,
            expected_ttft_ms=self.expected_ttft_ms or 0.0,
            loaded=self.engine.loaded,
            staged=self.engine.staged,
        )

    def public(self) -> dict[str, Any]:
        """The ``timings`` object of a response."""
        return {
            **{f"{name}_ms": ms for name, ms in self.spans().items()},
            "unattributed_ms": self.unattributed_ms,
            "detokenize_ms": self.detokenize_ms,
            "total_ms": self.total_ms,
            "ttft_ms": self.ttft_ms,
            "ttfo_ms": self.ttfo_ms,
            "tpot_ms": self.tpot_ms,
            "itl_ms": itl_summary(self.itl_ms),
            "cached_tokens": self.engine.cached_tokens,
            "loaded_tokens": self.engine.loaded_tokens,
            **_tiers(self.engine),
            "retained_tokens": self.engine.retained_tokens,
            "drafted_tokens": self.engine.drafted_tokens,
            "accepted_tokens": self.engine.accepted_tokens,
            "preemptions": self.engine.preemptions,
            **drafting_summary(self.engine),
            **self._rates(),
            **({"route": self.route} if self.route else {}),
            **({"slo": self._slo(self.promise)} if self.promise is not None else {}),
        }

    def _slo(self, promise: Promise) -> dict[str, Any]:
        target_ms = promise.slo.ttft_ms
        met = 0.0 < self.ttft_ms <= target_ms
        return {
            "class": promise.name, "ttft_target_ms": target_ms, "expected_ttft_ms": self.expected_ttft_ms, "met": met
        }  # fmt: skip

    def _rates(self) -> dict[str, float | int]:
        """Counts, times and rates under the names that clients of other servers show. Rates of nothing are 0; rates of
        decoding leave out the first token, which prefill brings."""
        computed, later = self.prompt_tokens - self.engine.cached_tokens, max(0, self.output_tokens - 1)
        return {
            "cache_n": self.engine.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": self.prefill_ms,
            "prompt_per_token_ms": _ratio(self.prefill_ms, computed),
            "prompt_per_second": _ratio(1e3 * computed, self.prefill_ms),
            "predicted_n": self.output_tokens,
            "predicted_ms": self.decode_ms,
            "predicted_per_token_ms": _ratio(self.decode_ms, later),
            "predicted_per_second": _ratio(1e3 * later, self.decode_ms),
        }


@dataclass(frozen=True, slots=True)
class Written:
    """How long the server waited for a client to take its stream, in ms."""

    ms: float = 0.0
    last_ms: float = 0.0
    """Part of ``ms`` that came after the account's end."""
    unread_ms: float = 0.0
    """That the client's receive buffer was full while more was ready for it."""


def gone_on(first: Timings, then: Timings) -> Timings:
    """Of a sequence that one engine began and another one went on with. Decoding is all that followed its first token,
    the way from one to the other too; what was cached of its prompt, the first one had."""
    began_ms = first.submitted_s * 1e3 + first.queue_ms + first.prefill_ms
    ended_ms = then.submitted_s * 1e3 + then.queue_ms + then.prefill_ms + then.decode_ms
    return msgspec.structs.replace(
        first,
        decode_ms=ended_ms - began_ms,  # on one clock, as long as both engines are on one machine
        drafted_tokens=first.drafted_tokens + then.drafted_tokens,
        accepted_tokens=first.accepted_tokens + then.accepted_tokens,
        preemptions=first.preemptions + then.preemptions,
        decode_steps=first.decode_steps + then.decode_steps,
        draft_chains=first.draft_chains + then.draft_chains,
        draft_ms=first.draft_ms + then.draft_ms,
    )


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole > 0 else 0.0


def make_account(
    arrival: Arrival,
    engine: Timings | None,
    *,
    sent_s: float,
    ended_s: float,
    first_token_s: float | None,
    answered_s: float | None = None,
    itl_ms: Sequence[tuple[float, int]],
    prompt_tokens: int,
    output_tokens: int,
    detokenize_ms: float = 0.0,
    route: Mapping[str, str | int] | None = None,
    promise: Promise | None = None,
    expected_ttft_ms: float | None = None,
) -> Account:
    """``sent_s``: when it was handed to the engine. ``engine=None``: the sequence ended without the engine's own
    account; its time stays unattributed."""
    engine = engine or Timings()
    received_s = arrival.received_s
    total = (ended_s - received_s) * 1e3
    ttft = 0.0 if first_token_s is None else (first_token_s - received_s) * 1e3
    ttfo = 0.0 if answered_s is None else (answered_s - received_s) * 1e3
    dispatch = deliver = 0.0
    if engine.submitted_s:  # on the same clock, as long as both processes are on one machine
        dispatch = (engine.submitted_s - sent_s) * 1e3
        deliver = (ended_s - engine.submitted_s) * 1e3 - engine.queue_ms - engine.prefill_ms - engine.decode_ms
    return Account(
        receive_ms=round(arrival.receive_ms, 3),
        tokenize_ms=round(arrival.tokenize_ms, 3),
        route_ms=round((sent_s - received_s) * 1e3 - arrival.receive_ms - arrival.tokenize_ms, 3),
        dispatch_ms=round(dispatch, 3),
        queue_ms=round(engine.queue_ms, 3),
        prefill_ms=round(engine.prefill_ms, 3),
        decode_ms=round(engine.decode_ms, 3),
        deliver_ms=round(deliver, 3),
        total_ms=round(total, 3),
        ttft_ms=round(ttft, 3),
        ttfo_ms=round(ttfo, 3),
        itl_ms=tuple(itl_ms),
        engine=engine,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        detokenize_ms=round(detokenize_ms, 3),
        route=route or {},
        promise=promise,
        expected_ttft_ms=None if expected_ttft_ms is None else round(expected_ttft_ms, 3),
    )


def _tiers(engine: Timings) -> dict[str, Any]:
    """Where cached tokens came from, and what the sequence waited for, of one that a KV store had tokens of."""
    pool = {"pool": engine.cached_tokens - engine.loaded_tokens}
    found: dict[str, Any] = {"cached_by_tier": pool | engine.loaded} if engine.loaded else {}
    return found | ({"staged": staged_summary(engine.staged)} if engine.staged is not None else {})


def staged_summary(staged: StagedTokens) -> dict[str, Any]:
    """``compute_ms``: ``None`` where it is not known."""
    times = {"ms": round(staged.ms, 3), "compute_ms": round(staged.compute_ms, 3) or None}
    return {"store": staged.store, "num_tokens": staged.num_tokens, **times, "said": staged_words(staged)}


def staged_words(staged: StagedTokens) -> str:
    """``staged 3,072 tokens from disk in 41 ms, recompute 1,690``"""
    if not staged.num_tokens:
        return f"waited {staged.ms:,.0f} ms for {staged.store} in vain"
    said = f"staged {staged.num_tokens:,} tokens from {staged.store} in {staged.ms:,.0f} ms"
    return said + (f", recompute {staged.compute_ms:,.0f}" if staged.compute_ms else "")


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


def itl_summary(samples: Sequence[Sample]) -> dict[str, float | int | None]:
    """Token-weighted mean, median, P95 (``None`` of too few) and maximum; zeros when there was no second token."""
    if not samples:
        return {"count": 0, "mean": 0.0, "p50": 0.0, "p95": None, "max": 0.0}
    found = describe(samples) | {"max": max(value for value, _ in samples)}
    kept = {name: found[name] for name in ("count", "mean", "p50", "p95", "max")}
    return {name: None if value is None else round(value, 3) for name, value in kept.items()}
