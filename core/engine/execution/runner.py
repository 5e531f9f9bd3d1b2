"""Executes step plans: inputs, forward, sample or verify, draft. One device, strictly in plan order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine import native
from engine.contracts.drafter import DeviceDrafter, DraftRows, TargetStep, keeps_up
from engine.execution.adjust import adjusts
from engine.execution.backlog import Backlog
from engine.execution.draft_graphs import DraftGraphs
from engine.execution.graphs import Recorded, StepGraphs
from engine.execution.kv_cache import KVCache
from engine.execution.logprobs import Ranked, rank_prompt
from engine.execution.model import ForwardBatch, LoweredModel
from engine.execution.places import Place
from engine.execution.positions import TableRow
from engine.execution.running import RecordedDrafts, RunningStep, Sampled
from engine.execution.step import DeviceBroken, StepPlan, StepResult, StepRow, StepSkipped
from engine.execution.tables import DeviceTables
from engine.execution.transfer import Mark, mark, upload
from engine.execution.verify import Choice, Verified, VerifyRow, choose_tokens

T = TypeVar("T")

NO_HISTORY = torch.empty(0, dtype=torch.int64)
"""For rows whose logits are not adjusted: a view of the table for each row and step would be measurable."""

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at once: bounds memory at ``rows * vocab`` floats."""


class ModelRunner:
    """A model, its cache and its tables on one device."""

    def __init__(
        self,
        model: LoweredModel,
        kv: KVCache,
        tables: DeviceTables,
        drafter: DeviceDrafter | None = None,
        graphs: StepGraphs | None = None,
        draft_graphs: DraftGraphs | None = None,
    ) -> None:
        """``drafter``: one on the device, already started. ``draft_graphs``: of it, behind ``graphs``."""
        self.model = model
        self.kv = kv
        self.tables = tables
        self.drafter = drafter
        self._keeps_up = drafter is not None and keeps_up(drafter)
        self.graphs = graphs
        self.draft_graphs = draft_graphs
        self._backlog = Backlog()
        self._last: Mark | None = None
        """When the last step was done."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Hand one plan to the device. ``apply`` happened before (see :class:`DeviceQueue`).

        On a GPU this returns while the device works, unless a row uses rejection sampling or a drafter on the device
        drafts unrecorded.
        """
        recordings = native.recordings_made()
        late_ms, late_steps = self._catch_up(plan)
        started = mark(self.tables.device)
        bucket = None if self.graphs is None else self.graphs.find(plan.rows)
        sampled: Sampled | None
        recorded: Recorded | None = None
        if self.graphs is not None and bucket is not None:
            recorded = self.graphs.replay(bucket, plan.rows)
            batch, staged, taps = recorded.batch, recorded.staged, recorded.taps
            sampled, prompts = self._take(plan, recorded), {}
        else:
            batch = self.tables.inputs(plan.rows)
            hidden, found = self.model.forward(batch, self.kv, self.taps)
            staged, taps = None, tuple(found)
            sampled = self._sample(plan, batch, hidden)
            prompts = self._prompt_logprobs(plan, hidden)
        ended = mark(self.tables.device)
        drafts = None if recorded is None or not plan.drafter_follows else self._replay_drafts(plan, recorded)
        step = RunningStep(plan, sampled, prompts, (self._last, started, ended), drafts)
        self._last = ended if drafts is None else drafts.ended
        if self.drafter is not None:
            if drafts is None and self._is_told(plan):
                self._draft(self.drafter, plan, batch, staged, taps, step)
                self._last = mark(self.tables.device)
            step.late_ms, step.late_steps = late_ms, late_steps
        step.recorded = native.recordings_made() != recordings
        return step

    def _catch_up(self, plan: StepPlan) -> tuple[float, int]:
        """Tell the drafter of the steps that waited, unless this one may wait with them. Returns the milliseconds and
        how many steps."""
        late = None if self.drafter is None or self._backlog.takes(plan) else self._backlog.whole
        if self.drafter is None or late is None:
            return 0.0, 0
        count, started = len(self._backlog), time.perf_counter()
        # A drafter that fails now has a gap in its keys, which costs acceptance; it must not fail the next step, too.
        self._backlog.clear()
        self.drafter.extend(late)
        self._last = mark(self.tables.device)
        return (time.perf_counter() - started) * 1e3, count

    def _is_told(self, plan: StepPlan) -> bool:
        """Whether the drafter is told of a step, now or later."""
        return plan.drafter_follows and (self._keeps_up or any(row.wants_drafts > 0 for row in plan.rows))

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else tuple(self.drafter.taps)

    def _take(self, plan: StepPlan, recorded: Recorded) -> Sampled:
        """The tokens of a replayed step. Those the graph chose are the most likely ones; if any row wants something
        else, all are chosen anew from the logits the graph left."""
        rows = [self._verify_row(row) for row in plan.rows]
        places: slice | Tensor = slice(sum(row.num_queries for row in plan.rows))
        if any(row.num_queries != recorded.bucket.queries for row in plan.rows):
            places = upload(recorded.places(plan.rows), torch.int64, self.tables.device)
        if all(row.is_plain for row in rows):
            choice = Choice(tuple(rows), recorded.tokens[places], (), {})
        else:
            # The recording wrote its own tokens over the drafts, which penalties count.
            self.tables.write_drafts(plan.rows)
            choice = choose_tokens(recorded.logits[places], rows, on_triton=self.model.on_triton)
            self.tables.write(recorded.batch.slots[places], recorded.batch.positions[places] + 1, choice.tokens)
            if self.draft_graphs is not None:
                recorded.tokens[places] = choice.tokens
        return Sampled(tuple(range(len(rows))), choice)

    def _replay_drafts(self, plan: StepPlan, recorded: Recorded) -> RecordedDrafts | None:
        """Have the drafter follow a replayed step, if that is recorded, too. Nothing here waits for the device."""
        if self.draft_graphs is None:
            return None
        bucket = self.draft_graphs.find(recorded.bucket, plan.rows)
        if bucket is None:
            return None
        return RecordedDrafts(self.draft_graphs.replay(bucket), mark(self.tables.device))

    def _sample(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> Sampled | None:
        """Sample every row that has all its tokens."""
        wanted: list[int] = []
        sampling: list[int] = []
        end = 0
        for i, row in enumerate(plan.rows):
            end += row.num_queries
            if row.samples:
                wanted.extend(range(end - 1 - len(row.drafts), end))
                sampling.append(i)
        if not sampling:
            return None
        slots, positions = batch.slots, batch.positions
        if len(wanted) != hidden.shape[0]:
            index = upload(wanted, torch.int64, hidden.device)
            hidden, slots, positions = hidden[index], slots[index], positions[index]
        rows = [self._verify_row(plan.rows[i]) for i in sampling]
        choice = choose_tokens(self.model.head(hidden), rows, on_triton=self.model.on_triton)
        self.tables.write(slots, positions + 1, choice.tokens)
        return Sampled(tuple(sampling), choice)

    def _verify_row(self, row: StepRow) -> VerifyRow:
        admit = self.tables.slots[row.slot].admit
        known = row.start + row.num_tokens if adjusts(admit.params) else 0
        return VerifyRow(
            params=admit.params,
            seed=admit.seed,
            first_output=row.output_index,
            prompt_len=admit.prompt_len,
            history=self.tables.history(row.slot, known) if known else NO_HISTORY,
            stop_ids=admit.stop_ids,
            drafts=row.drafts,
            draft_probs=row.draft_probs,
            row=TableRow(self.tables.tokens, row.slot),
        )

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, tuple[Ranked, ...]]:
        """Logprobs of prompt tokens ``start + 1 ..`` for the rows that want them, a bounded number at a time."""
        results: dict[int, tuple[Ranked, ...]] = {}
        begin = 0
        for i, row in enumerate(plan.rows):
            admit = self.tables.slots[row.slot].admit
            top = admit.params.prompt_logprobs
            count = min(row.start + row.num_tokens, admit.prompt_len - 1) - row.start
            if top is not None and count > 0:
                targets = self.tables.tokens[row.slot, row.start + 1 : row.start + 1 + count]
                parts = []
                for at in range(0, count, PROMPT_LOGPROB_ROWS):
                    stop = min(at + PROMPT_LOGPROB_ROWS, count)
                    logits = self.model.head(hidden[begin + at : begin + stop])
                    # A copy: the table may change before the host reads it.
                    parts.append(rank_prompt(logits, targets[at:stop].clone(), top))
                results[i] = tuple(parts)
            begin += row.num_queries
        return results

    def _draft(
        self,
        drafter: DeviceDrafter,
        plan: StepPlan,
        batch: ForwardBatch,
        staged: Any,
        taps: Sequence[Tensor],
        step: RunningStep,
    ) -> None:
        """Keep a drafter in step with the target, and let it propose; then this waits for the verdicts."""
        started = time.perf_counter()
        place = Place(batch.positions, batch.slot_mapping, batch.attention, staged)
        target = TargetStep(
            tokens=batch.token_ids,
            next_tokens=self._next_tokens(batch, step.sampled),
            positions=batch.positions,
            q_lens=batch.attention.q_lens,
            slots=batch.slots,
            taps=tuple(taps),
            place=place,
            drafts_follow=any(row.wants_drafts > 0 for row in plan.rows),
        )
        # What a graph leaves is overwritten by the next replay.
        if staged is None and self._backlog.takes(plan):
            self._backlog.add(plan, target, place)
        else:
            drafter.extend(target)
            rows = self._draft_rows(plan, batch.attention.q_lens, step.verified())
            step.propose(rows, drafter.propose(rows))
        step.draft_ms = (time.perf_counter() - started) * 1e3

    def _next_tokens(self, batch: ForwardBatch, sampled: Sampled | None) -> Tensor:
        """What follows each token of a batch."""
        if sampled is not None and sampled.choice.tokens.shape == batch.token_ids.shape:
            return sampled.choice.tokens.clamp(min=0)  # as the table has them
        return self.tables.tokens[batch.slots, batch.positions + 1]

    def _draft_rows(self, plan: StepPlan, q_lens: Sequence[int], verified: list[Verified]) -> DraftRows:
        """The rows that want drafts and got a token."""
        wanting, slots, last, lengths, newest, widths = [], [], [], [], [], []
        begin = 0
        for i, (row, verdict) in enumerate(zip(plan.rows, verified, strict=True)):
            if row.wants_drafts > 0 and verdict.tokens:
                settled = row.num_tokens + verdict.num_accepted
                wanting.append(i)
                slots.append(row.slot)
                last.append(begin + settled - 1)
                lengths.append(row.start + settled)
                newest.append(verdict.tokens[-1])
                widths.append(row.wants_drafts)
            begin += q_lens[i]
        columns = upload([*slots, *last, *lengths, *newest], torch.int64, self.tables.device).view(4, len(wanting))
        slots_there, last_there, positions, tokens = columns.unbind()
        return DraftRows(
            index=tuple(wanting),
            slots=slots_there,
            last=last_there,
            tokens=tokens,
            positions=positions,
            lengths=tuple(lengths),
            widths=tuple(widths),
        )


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
    admissions of skipped plans still take effect. :class:`DeviceBroken` says that there is nothing to resume.
    """

    def __init__(self, runner: ModelRunner, worker: DeviceWorker) -> None:
        self._runner = runner
        self._worker = worker
        self._failed = False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a plan; the returned function waits for its result and raises what the step raised."""
        launched = self._worker.start(partial(self._run, plan))

        def wait() -> StepResult:
            try:
                return launched().result()
            except torch.AcceleratorError as error:  # an illegal access, say: nothing works on this device any more
                raise DeviceBroken(f"the device failed: {error}") from error

        return wait

    def resume(self) -> None:
        """Execute plans again after a failure has been dealt with."""
        self._failed = False

    def close(self) -> None:
        self._worker.close()

    def _run(self, plan: StepPlan) -> RunningStep:
        try:
            self._runner.tables.apply(plan)
        except Exception as error:
            # Half an admission: whoever ran on it would read what the row's former owner left.
            self._failed = True
            raise DeviceBroken(f"the device tables could not be written: {error}") from error
        if self._failed:
            raise StepSkipped(f"step {plan.plan_id} was planned on top of a failed one")
        try:
            return self._runner.launch(plan)
        except BaseException:
            self._failed = True
            raise
