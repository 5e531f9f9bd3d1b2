"""Executes step plans: inputs, forward, sample and verify, draft. One device, strictly in plan order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.kernels.context import ForwardBatch
from engine.kernels.model import LoweredModel
from engine.kernels.transfer import Arriving, Mark, mark, upload
from engine.kv.cache import KVCache
from engine.kv.records import Records
from engine.ranks.context_parallel import Dealing
from engine.ranks.exchange import Exchange
from engine.sampling.constrained import Watched
from engine.sampling.logprobs import Ranked, rank_prompt
from engine.sampling.state import Feature
from engine.sampling.verify import Choice, accepted_of, choose_tokens, rank_tokens
from engine.step.graphs import CapturedStep, StepGraphs
from engine.step.plan import DeviceBroken, RecordMove, StepPlan, StepResult, StepRow, StepSkipped
from engine.step.running import RunningStep, Sampled, Times
from engine.step.tables import DeviceTables, StepInputs

T = TypeVar("T")

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at once: bounds memory at ``rows * vocab`` floats."""


class AfterSteps(Protocol):
    """What a drafter on the device does after steps: :class:`engine.drafting.runner.Drafts`."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it wants."""
        ...

    def after(
        self, plan: StepPlan, inputs: StepInputs, aux_hidden_states: Sequence[Tensor], captured: CapturedStep | None
    ) -> Tensor | None:
        """Let the drafter see a step and propose after it; its drafts go into the tables. ``captured``: of a replayed
        step. Returns whether all drafts are tokens, bool on the device; ``None`` where none are wanted."""
        ...


class ModelRunner:
    """A model, its cache and its tables on one device."""

    def __init__(
        self,
        model: LoweredModel,
        kv: KVCache,
        tables: DeviceTables,
        drafts: AfterSteps | None = None,
        exchange: Exchange | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        """``exchange``: with other ranks, if there are any; ``dealing``: if they share out the tokens of steps."""
        self._exchange = exchange
        self._dealing = dealing
        self._chooses = exchange is None or exchange.chooses
        self.model = model
        self.kv = kv
        self.tables = tables
        self.drafts = drafts
        self.graphs: StepGraphs | None = None
        """Of decode steps and short prompts, once they are captured."""
        self.records: Records | None = None
        """Of the cache, in memory that a store has."""
        self._last: Mark | None = None
        """When the last step was done."""
        self._loading: Mark | None = None
        """When records of the plan that was applied last began to be copied."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return () if self.drafts is None else self.drafts.aux_layers

    @torch.inference_mode()
    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions, with the blocks that they copy, records, new blocks and host drafts."""
        self.tables.apply(plan)
        for admit in plan.admits:
            for copy in admit.copies:
                self.kv.copy_block(copy.group, copy.source, copy.target)
        self._loading = mark(self.tables.device) if plan.loads else None
        for move in plan.loads:  # perhaps into a block that was copied above and evicted since
            assert self.records is not None
            self.records.scatter(move.group, move.slots, move.blocks)

    @property
    def is_alone(self) -> bool:
        """No other rank computes a part of its steps."""
        return self._exchange is None

    @property
    def samples(self) -> bool:
        """Tokens are chosen after the layers of this rank: it is in the last stage."""
        return self._exchange is None or self._exchange.samples

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, list[Tensor]]:
        """As :meth:`LoweredModel.forward`; what comes back means something in the last stage alone."""
        if self._exchange is None:
            return self.model.forward(batch, self.kv, self.aux_layers)
        return self._exchange.forward(self.model, batch, self.kv)

    def _forward(self, rows: Sequence[StepRow], batch: ForwardBatch) -> tuple[Tensor, list[Tensor]]:
        dealt = None if self._dealing is None else self._dealing.step(rows)
        if dealt is None:
            return self.forward(batch)
        hidden, aux = self.forward(dealt.batch)
        return (dealt.whole(hidden), [dealt.whole(x) for x in aux]) if self.samples else (hidden, aux)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Hand one plan to the device; on a GPU this returns while the device works. ``apply`` happened before (see
        :class:`DeviceQueue`)."""
        started = mark(self.tables.device)
        bucket = None if self.graphs is None else self.graphs.find(plan.rows)
        captured: CapturedStep | None = None
        if self.graphs is None or bucket is None:
            inputs = self.tables.inputs(plan.rows)
            watched = self.tables.watch([row for row in plan.rows if row.samples]) if self.samples else None
            hidden, aux = self._forward(plan.rows, inputs.forward)
            sampled, prompts = self._sample(plan, inputs, hidden, watched), self._prompt_logprobs(plan, hidden)
        else:
            captured, errors = self.graphs.replay(bucket, plan.rows)
            inputs, aux = captured.step_inputs, list(captured.aux_hidden_states)
            sampled, prompts = self._captured(plan, captured, errors), {}
        done = ended = mark(self.tables.device)
        valid = None
        if self.drafts is not None and plan.syncs_drafter:
            valid = self.drafts.after(plan, inputs, aux, captured)
            ended = mark(self.tables.device)
        times = Times(self._last, self._loading or started, started, done, ended)
        self._last = ended
        relayed = self._drafts_of(plan) if valid is not None and self._exchange and self._exchange.relays else None
        return RunningStep(plan, sampled, prompts, times, valid, relayed, captured is not None)

    def _drafts_of(self, plan: StepPlan) -> Tensor:
        """What a drafter has just proposed: int64 ``[R, most wanted of a row]``."""
        rows = upload([row.row_id for row in plan.rows], torch.int64, self.tables.device)[:, None]
        after = torch.arange(1, 1 + max(row.wants_drafts for row in plan.rows), device=self.tables.device)
        return self.tables.tokens[rows, self.tables.computed[rows] + after]

    # Tokens -----------------------------------------------------------------------------------------------------

    def _captured(self, plan: StepPlan, captured: CapturedStep, errors: Mapping[int, str]) -> Sampled | None:
        """The tokens of a replayed step. Logprobs of other tokens than the chosen ones are made here, not in it."""
        if not self._chooses:
            return None
        num_drafts, choices = tuple(row.num_drafts for row in plan.rows), captured.bucket.choices
        tops = self._logprobs_wanted(plan.rows)
        others = [top or None for top in tops]
        ranked = rank_tokens(captured.logits, captured.tokens, num_drafts, others, choices)
        own = tuple(i for i, top in enumerate(tops) if top == 0)
        choice = Choice(
            num_drafts,
            captured.tokens,
            captured.accepted[: len(plan.rows)],
            ranked,
            choices,
            (own, captured.logprobs) if own else None,
            captured.chosen,
        )
        return Sampled(tuple(range(len(plan.rows))), choice, errors)

    def _logprobs_wanted(self, rows: Sequence[StepRow]) -> list[int | None]:
        return [self.tables.requests[row.row_id].sampling.logprobs for row in rows]

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, watched: Watched | None) -> Sampled | None:
        """Sample and verify every row that has all its tokens, and move all rows on. ``watched``: the text of those
        that follow a grammar."""
        tables, batch = self.tables, inputs.forward
        ends = inputs.starts + inputs.num_tokens
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        if not sampling or not self.samples:
            tables.computed[inputs.row_ids] = ends
            return None
        q_ends = list(accumulate(row.num_queries for row in plan.rows))
        wanted = [at for i in sampling for at in range(q_ends[i] - 1 - plan.rows[i].num_drafts, q_ends[i])]
        token_ids, row_ids, positions = batch.token_ids, batch.row_ids, batch.positions
        if len(wanted) != hidden.shape[0]:
            index = upload(wanted, torch.int64, hidden.device)
            hidden, token_ids, row_ids, positions = (t[index] for t in (hidden, token_ids, row_ids, positions))
        rows = [plan.rows[i] for i in sampling]
        errors: Mapping[int, str] = {}
        num_drafts = tuple(row.num_drafts for row in rows)
        features, longest = tables.features(rows), max(row.max_end for row in rows)
        if features is Feature.NONE and self._exchange is not None and self.model.own_head is not None:
            # The best of each rank's best: no rank needs all logits, and all find the same.
            logits = self.model.own_head.of_rows(hidden)
            tokens = self._exchange.most_likely(logits, self.model.first_token)
        else:
            chosen, logits = tables.sampling.at(row_ids, positions, features), self.model.head(hidden)
            tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
            if self._chooses:
                if watched is not None:
                    masks = watched.masks(hidden.device)
                    masks.apply_(logits)
                    errors = masks.errors
                tokens, logits = choose_tokens(
                    logits, chosen, tables.sampling, tables.tokens, longest, self.model.on_triton
                )
            tokens = tables.agreed(tokens)
        accepted = accepted_of(token_ids, tokens, num_drafts)
        tables.write(row_ids, positions + 1, tokens)
        if len(sampling) == len(plan.rows):
            ends += accepted
        else:
            ends.index_add_(0, upload(sampling, torch.int64, hidden.device), accepted)
        tables.computed[inputs.row_ids] = ends
        if not self._chooses:
            return None
        ranked = rank_tokens(logits, tokens, num_drafts, self._logprobs_wanted(rows))
        return Sampled(tuple(sampling), Choice(num_drafts, tokens, accepted, ranked), errors)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, tuple[Ranked, ...]]:
        """Logprobs of prompt tokens after those of each row that wants them, a bounded number at a time."""
        results: dict[int, tuple[Ranked, ...]] = {}
        if not self.samples:
            return results
        begin = 0
        for i, row in enumerate(plan.rows):
            request = self.tables.requests[row.row_id]
            top, start = request.sampling.prompt_logprobs, row.max_start  # exact: nothing is drafted in a prompt
            count = min(start + row.num_tokens, request.prompt_len - 1) - start
            if top is not None and count > 0:
                targets = self.tables.tokens[row.row_id, start + 1 : start + 1 + count]
                parts = []
                for at in range(0, count, PROMPT_LOGPROB_ROWS):
                    stop = min(at + PROMPT_LOGPROB_ROWS, count)
                    logits = self.model.head(hidden[begin + at : begin + stop])
                    if not self._chooses:
                        continue
                    # A copy: the table may change before the host reads it.
                    parts.append(rank_prompt(logits, targets[at:stop].clone(), top))
                results[i] = tuple(parts)
            begin += row.num_queries
        return results


class DeviceWorker:
    """Where everything runs that computes: this thread, or one of its own.

    With a thread of its own, loading must run there too: kernels, and torch's OpenMP library, keep one team of threads
    for each thread that calls.
    """

    def __init__(self, own_thread: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="device") if own_thread else None

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Run after what was started before; the returned function waits and raises what the function raised."""
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

    After a step failed, everything queued after it is skipped (:class:`StepSkipped`) until :meth:`resume`;
    admissions of skipped plans still take effect, with their copies of blocks. :class:`DeviceBroken` says that there is
    nothing to resume.
    """

    def __init__(self, runner: ModelRunner, worker: DeviceWorker) -> None:
        self._runner = runner
        self._worker = worker
        self._waiting = DeviceWorker(own_thread=runner.tables.device != "cpu")
        """For copies to memory: a GPU is still at them when :meth:`Records.gather` returns."""
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

    def store(self, moves: Sequence[RecordMove], done: Callable[[bool], None]) -> None:
        """Queue copies of committed blocks to memory, then call ``done``, from any thread: whether all went well.
        Without any it is called once the records of earlier plans are in their blocks."""
        self._worker.start(partial(self._store, moves, done))

    def _store(self, moves: Sequence[RecordMove], done: Callable[[bool], None]) -> None:
        records = self._runner.records
        assert records is not None
        try:
            arriving = [records.gather(move.group, move.blocks, move.slots) for move in moves] or [records.loaded()]
        except Exception as error:
            _not_stored(error, done)
        else:
            self._waiting.start(partial(_arrived, arriving, done))

    def resume(self) -> None:
        """Execute plans again after a failure has been dealt with."""
        self._failed = False

    def close(self) -> None:
        self._worker.close()
        self._waiting.close()

    def _run(self, plan: StepPlan) -> RunningStep:
        try:
            self._runner.apply(plan)
        except Exception as error:
            # Half an admission: whoever ran on it would read what the row's or a block's former owner left.
            self._failed = True
            raise DeviceBroken(f"the device tables could not be written: {error}") from error
        if self._failed:
            raise StepSkipped(f"step {plan.plan_id} was planned on top of a failed one")
        try:
            return self._runner.launch(plan)
        except BaseException:
            self._failed = True
            raise


def _arrived(copies: Sequence[Arriving], done: Callable[[bool], None]) -> None:
    try:
        for copy in copies:
            copy.wait()
    except Exception as error:
        _not_stored(error, done)
    else:
        done(True)


def _not_stored(error: Exception, done: Callable[[bool], None]) -> None:
    """Records are not kept; a device that is broken shows at the next step."""
    traceback.print_exception(error)
    done(False)
