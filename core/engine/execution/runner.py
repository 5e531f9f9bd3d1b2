"""Executes step plans: inputs, forward, sample or verify, draft. One device, strictly in plan order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.contracts.drafter import Drafter, DraftRow
from engine.contracts.request import TokenLogprobs
from engine.execution.kv_cache import KVCache
from engine.execution.logprobs import prompt_logprobs
from engine.execution.model import ForwardBatch, LoweredModel
from engine.execution.step import RowResult, StepPlan, StepResult, StepRow, StepSkipped
from engine.execution.tables import DeviceTables
from engine.execution.verify import Verified, VerifyRow, verify

T = TypeVar("T")

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at once: bounds memory at ``rows * vocab`` floats."""


class ModelRunner:
    """A model, its cache and its tables on one device."""

    def __init__(self, model: LoweredModel, kv: KVCache, tables: DeviceTables, drafter: Drafter) -> None:
        self.model = model
        self.kv = kv
        self.tables = tables
        self.drafter = drafter

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. ``apply`` happened before (see :class:`DeviceQueue`)."""
        started = time.perf_counter()
        batch = self.tables.inputs(plan.rows)
        hidden, taps = self.model.forward(batch, self.kv, self.drafter.taps)
        verified = self._sample(plan, batch, hidden)
        prompts = self._prompt_logprobs(plan, batch, hidden)
        device_ms = (time.perf_counter() - started) * 1e3
        drafts, draft_ms = self._draft(plan, batch, taps, verified)
        rows = tuple(
            RowResult(
                tokens=v.tokens,
                num_accepted=v.num_accepted,
                logprobs=v.logprobs,
                prompt_logprobs=prompt,
                drafts=draft,
                draft_probs=probs,
                error=v.error,
            )
            for v, prompt, (draft, probs) in zip(verified, prompts, drafts, strict=True)
        )
        return StepResult(plan.plan_id, rows, device_ms, draft_ms)

    def _sample(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> list[Verified]:
        """Sample every row that has all its tokens; the others get an empty result."""
        wanted: list[int] = []
        sampling: list[tuple[int, VerifyRow]] = []
        end = 0
        for i, row in enumerate(plan.rows):
            end += row.num_queries
            if row.samples:
                wanted.extend(range(end - 1 - len(row.drafts), end))
                sampling.append((i, self._verify_row(row)))
        results = [Verified(tokens=(), num_accepted=0, logprobs=())] * len(plan.rows)
        if not sampling:
            return results
        if len(wanted) != hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        logits = self.model.head(hidden)
        written = []
        for (i, _), result in zip(sampling, verify(logits, [row for _, row in sampling]), strict=True):
            results[i] = result
            # The step after a failed row may be queued already: it is dropped, but must find a token to embed.
            tokens = (0,) if result.error else result.tokens
            written.append((plan.rows[i].slot, plan.rows[i].start + plan.rows[i].num_tokens, tokens))
        self.tables.write_outputs(written)
        return results

    def _verify_row(self, row: StepRow) -> VerifyRow:
        admit = self.tables.slots[row.slot].admit
        return VerifyRow(
            params=admit.params,
            seed=admit.seed,
            first_output=row.output_index,
            prompt_len=admit.prompt_len,
            history=self.tables.history(row.slot, row.start + row.num_tokens),
            stop_ids=admit.stop_ids,
            drafts=row.drafts,
            draft_probs=row.draft_probs,
        )

    def _prompt_logprobs(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> list[tuple[TokenLogprobs, ...]]:
        """Logprobs of prompt tokens ``start + 1 ..`` for the rows that want them, a bounded number at a time."""
        results: list[tuple[TokenLogprobs, ...]] = []
        begin = 0
        for row in plan.rows:
            admit = self.tables.slots[row.slot].admit
            top = admit.params.prompt_logprobs
            count = min(row.start + row.num_tokens, admit.prompt_len - 1) - row.start
            if top is None or count <= 0:
                results.append(())
            else:
                targets = self.tables.tokens[row.slot, row.start + 1 : row.start + 1 + count]
                found: list[TokenLogprobs] = []
                for at in range(0, count, PROMPT_LOGPROB_ROWS):
                    stop = min(at + PROMPT_LOGPROB_ROWS, count)
                    logits = self.model.head(hidden[begin + at : begin + stop])
                    found.extend(prompt_logprobs(logits, targets[at:stop], top))
                results.append(tuple(found))
            begin += row.num_queries
        return results

    def _draft(
        self, plan: StepPlan, batch: ForwardBatch, taps: Sequence[Tensor], verified: list[Verified]
    ) -> tuple[list[tuple[tuple[int, ...], Tensor | None]], float]:
        """Keep the drafter's state in step, and let one on the device propose."""
        drafts: list[tuple[tuple[int, ...], Tensor | None]] = [((), None)] * len(plan.rows)
        if self.drafter.max_width == 0:
            return drafts, 0.0
        started = time.perf_counter()
        self._extend(plan, batch, taps, verified)
        if self.drafter.placement == "device":
            wanting = [
                (i, DraftRow(row.slot, (), self.tables.slots[row.slot].admit.prompt_len, row.wants_drafts))
                for i, row in enumerate(plan.rows)
                if row.wants_drafts > 0 and verified[i].tokens
            ]
            if wanting:
                proposed = self.drafter.propose([row for _, row in wanting])
                for at, ((i, _), tokens) in enumerate(zip(wanting, proposed.tokens, strict=True)):
                    drafts[i] = (tokens, None if proposed.probs is None else proposed.probs[at, : len(tokens)])
        return drafts, (time.perf_counter() - started) * 1e3

    def _extend(self, plan: StepPlan, batch: ForwardBatch, taps: Sequence[Tensor], verified: list[Verified]) -> None:
        """Hand the drafter every committed position: rejected drafts never reach it."""
        keep: list[int] = []
        slots: list[int] = []
        begin = 0
        for row, result in zip(plan.rows, verified, strict=True):
            committed = row.num_tokens + result.num_accepted
            keep.extend(range(begin, begin + committed))
            slots.extend([row.slot] * committed)
            begin += row.num_queries
        index = torch.tensor(keep, device=batch.token_ids.device)
        next_tokens = self.tables.tokens[torch.tensor(slots, device=index.device), batch.positions[index] + 1]
        self.drafter.extend(slots, batch.token_ids[index], next_tokens, [tap[index] for tap in taps])


class DeviceWorker:
    """Where everything runs that computes: this thread, or one of its own.

    With a thread of its own, loading must run there too. OpenMP keeps one team per calling thread, and as soon as the
    teams together have more threads than the machine has cores, waiting at a barrier becomes sleeping: on a CPU that
    costs more than all of the overlap gains.
    """

    def __init__(self, own_thread: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="device") if own_thread else None

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Run behind what was started before; the returned function waits and raises what the function raised."""
        if self._pool is not None:
            return self._pool.submit(function).result
        future: Future[T] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future.result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class DeviceQueue:
    """Plans in, results out, in order.

    After a step failed, everything queued behind it is skipped (:class:`StepSkipped`) until :meth:`resume`;
    admissions of skipped plans still take effect.
    """

    def __init__(self, runner: ModelRunner, worker: DeviceWorker) -> None:
        self._runner = runner
        self._worker = worker
        self._failed = False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a plan; the returned function waits for its result and raises what the step raised."""
        return self._worker.start(partial(self._run, plan))

    def resume(self) -> None:
        """Execute plans again after a failure has been dealt with."""
        self._failed = False

    def close(self) -> None:
        self._worker.close()

    def _run(self, plan: StepPlan) -> StepResult:
        self._runner.tables.apply(plan)
        if self._failed:
            raise StepSkipped(f"step {plan.plan_id} was planned on top of a failed one")
        try:
            return self._runner.execute(plan)
        except BaseException:
            self._failed = True
            raise
