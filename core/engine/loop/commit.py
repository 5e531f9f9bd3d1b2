"""From a step's results to committed tokens: drop what is stale, apply stops and limits, publish."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.contracts.request import FinishReason, TokenLogprobs, TokensOut
from engine.loop.drafting import Drafted
from engine.loop.ledger import InFlight
from engine.loop.pool import Pool
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status
from engine.step.plan import RowResult, StepResult, StepRow


class Committer:
    """Applies results to sequences, in plan order."""

    def __init__(
        self, queues: Queues, pool: Pool, publish: Callable[[TokensOut], None], clock: Callable[[], float]
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._publish = publish
        self._clock = clock

    def commit(self, step: InFlight, result: StepResult) -> Drafted:
        """Apply a step's results. Returns what became of the drafts of its live rows."""
        now, drafted = self._clock(), Drafted()
        draft_ms = step.draft_ms + result.draft_ms
        rows = zip(step.owners, step.plan.rows, result.rows, step.asked, strict=True)
        for (sequence, epoch), row, outcome, asked in rows:
            if sequence.epoch != epoch or sequence.status is Status.FINISHED:
                continue
            if row.samples and row.num_tokens == 1 and sequence.num_outputs:
                drafted.add(asked, row.num_drafts, outcome.num_accepted)
            if sequence.first_token_s > 0.0:
                sequence.draft_ms += draft_ms
            self._apply(sequence, row, outcome, now)
        return drafted

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "", spoiled: bool = False) -> None:
        """End a sequence outside a step: aborted, refused or failed. ``spoiled``: its keys and values are no good."""
        self._end(sequence, spoiled)
        now = self._clock()
        timings = sequence.timings(now)
        self._publish(TokensOut(sequence.request_id, finish_reason=reason, error=error, timings=timings, at_s=now))

    def _apply(self, s: Sequence, row: StepRow, outcome: RowResult, now: float) -> None:
        s.prompt_logprobs.extend(outcome.prompt_logprobs)
        if outcome.error:
            self.finish(s, "error", outcome.error, spoiled=True)
            return
        if row.samples:
            s.num_drafted += row.num_drafts
            s.num_accepted += outcome.num_accepted
            s.num_decode_steps += s.first_token_s > 0.0
            s.num_draft_chains += row.num_drafts > 0
        taken, reason = self._stop(s, outcome.tokens)
        s.commit(row, outcome, taken)
        self._pool.commit(s)
        if row.samples:
            self._emit(s, outcome, taken, reason, now)

    def _stop(self, s: Sequence, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many of the new tokens count, and whether they end the output. Stops come before commit."""
        limit = s.request.sampling.max_tokens
        if tokens and limit == 0:
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
        cached = retained = 0
        if s.first_token_s == 0.0:
            s.first_token_s = now
            cached, retained = s.num_cached, s.num_retained
            if s.request.sampling.prompt_logprobs is not None:
                prompt_logprobs = (None, *s.prompt_logprobs)
        s.last_token_s = now
        if reason is not None:
            self._end(s)
        out = TokensOut(
            s.request_id,
            tokens=tokens,
            logprobs=outcome.logprobs[:taken],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=tokens[-1] if reason == "stop" else None,
            timings=None if reason is None else s.timings(now),
            at_s=now,
            cached_tokens=cached,
            retained_tokens=retained,
        )
        if s.request.sampling.max_tokens == 0:  # whoever hears of it may look for what was computed
            self._pool.when_stored(partial(self._publish, out))
        else:
            self._publish(out)

    def _end(self, sequence: Sequence, spoiled: bool = False) -> None:
        self._queues.finish(sequence)
        self._pool.release(sequence, spoiled)
