"""From a step's results to committed tokens: drop what is stale, apply stops and limits, publish."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.contracts.request import FinishReason, TokenLogprobs, TokensOut
from engine.execution.step import RowResult, StepResult, StepRow
from engine.loop.drafting import Drafted, Drafting
from engine.loop.ledger import InFlight
from engine.loop.pool import Pool
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status


class Committer:
    """Applies results to sequences, in plan order."""

    def __init__(self, queues: Queues, pool: Pool, drafting: Drafting, publish: Callable[[TokensOut], None]) -> None:
        self._queues = queues
        self._pool = pool
        self._drafting = drafting
        self._publish = publish

    def commit(self, step: InFlight, result: StepResult) -> Drafted:
        """Apply a step's results. Returns what became of the drafts of its live rows."""
        now = time.monotonic()
        drafted = Drafted()
        draft_ms = step.draft_ms + result.draft_ms + result.late_ms
        for (sequence, epoch), row, outcome in zip(step.owners, step.plan.rows, result.rows, strict=True):
            if sequence.epoch != epoch or sequence.status is Status.FINISHED:
                continue
            if row.drafts:
                drafted.add(len(row.drafts), outcome.num_accepted)
            if sequence.first_token_s > 0.0:
                sequence.draft_ms += draft_ms
            self._apply(sequence, row, outcome, now)
        return drafted

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a sequence outside a step: aborted, refused or failed."""
        self._end(sequence)
        self._publish(
            TokensOut(
                sequence.request_id,
                finish_reason=reason,
                error=error,
                timings=sequence.timings(time.monotonic()),
                at_s=time.monotonic(),
            )
        )

    def _apply(self, s: Sequence, row: StepRow, outcome: RowResult, now: float) -> None:
        s.prompt_logprobs.extend(outcome.prompt_logprobs)
        if outcome.error:
            self.finish(s, "error", outcome.error)
            return
        if not row.samples:
            s.computed = row.start + row.num_tokens
            self._pool.commit(s)
            return
        s.pending -= 1
        s.num_drafted += len(row.drafts)
        s.num_accepted += outcome.num_accepted
        s.num_rounds += s.first_token_s > 0.0
        s.num_chains += bool(row.drafts)
        taken, reason = self._stop(s, outcome.tokens)
        s.tokens.extend(outcome.tokens[:taken])
        s.computed = row.start + row.num_tokens + min(outcome.num_accepted, taken)
        if s.drafts_in_flight:
            s.scheduled, s.drafts_in_flight = s.computed, False
        if outcome.drafts:
            self._drafting.check(outcome.drafts, row.wants_drafts)
            s.drafts, s.draft_probs = outcome.drafts, outcome.draft_probs
        self._pool.commit(s)
        self._emit(s, outcome, taken, reason, now)

    def _stop(self, s: Sequence, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many of the new tokens count, and whether they end the output. Stops come before commit."""
        limit = s.request.sampling.max_tokens
        if limit == 0:
            return 0, "length"
        for i, token in enumerate(tokens):
            if token in s.stop_ids:
                return i + 1, "stop"
            if s.num_outputs + i + 1 >= limit or len(s.tokens) + i + 1 >= s.max_total:
                return i + 1, "length"
        return len(tokens), None

    def _emit(self, s: Sequence, outcome: RowResult, taken: int, reason: FinishReason | None, now: float) -> None:
        tokens = outcome.tokens[:taken]
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if s.first_token_s == 0.0:
            s.first_token_s = now
            if s.request.sampling.prompt_logprobs is not None:
                prompt_logprobs = (None, *s.prompt_logprobs)
        s.last_token_s = now
        if reason is not None:
            self._end(s)
        self._publish(
            TokensOut(
                s.request_id,
                tokens=tokens,
                logprobs=outcome.logprobs[:taken],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_token=tokens[-1] if reason == "stop" else None,
                timings=None if reason is None else s.timings(now),
                at_s=now,
            )
        )

    def _end(self, sequence: Sequence) -> None:
        self._queues.finish(sequence)
        self._pool.release(sequence)
