"""Captured steps: CUDA graphs for each batch shape, captured before the engine is ready and replayed ever after.

A graph is captured for ``rows`` requests of ``queries`` tokens each: of decode steps a token and its drafts, of short
prompts known tokens. A smaller batch is padded: rows that belong to nobody read and write the table row and the KV
block that are nobody's, and queries a row does not have write keys after its last one, where the next step overwrites
them before anything reads them. What may change from step to step is two integers per row, its id and how many tokens
it has, copied in front of the replay if they do; everything else is in the device tables.

The graph of a step takes the most likely tokens. Where a request asks for others (temperature, filters, penalties, a
grammar), a second graph after it chooses them anew from the logits the first one left, by the rows' sampling state;
where one asks for logprobs of its tokens, a third computes them. What a drafter on the device does after a step is
captured apart (:mod:`engine.drafting.graphs`).

Buckets are captured from the largest to the smallest into one memory pool, so that the smaller ones live in the memory
of the larger. Capturing after :meth:`StepGraphs.capture` has returned is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.kernels.context import ForwardBatch, prepared_of
from engine.kernels.model import LoweredModel
from engine.kernels.transfer import refill
from engine.kernels.triton.device import runs_triton
from engine.kv.cache import KVCache
from engine.sampling.state import Feature
from engine.sampling.verify import accepted_drafts, choose_tokens
from engine.step.plan import StepRow
from engine.step.tables import BlockShare, DeviceTables, StepInputs

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a function, at least once, captures it, and returns what replays it."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A batch shape: so many rows of so many tokens."""

    rows: int
    queries: int
    prompt: bool = False
    """All tokens of a row are known, and one is chosen after the last. Else a row is a known token and drafts, and one
    is chosen after each."""

    @property
    def tokens(self) -> int:
        return self.rows * self.queries

    def __str__(self) -> str:
        return f"a prompt of {self.queries}" if self.prompt else f"{self.rows} x {self.queries}"

    @property
    def choices(self) -> int:
        """Tokens chosen for each row."""
        return 1 if self.prompt else self.queries

    @property
    def num_choices(self) -> int:
        return self.rows * self.choices


@dataclass(frozen=True, slots=True)
class ChosenAfter:
    """The tokens after which one is chosen: all of a decode step, the last of a prompt."""

    token_ids: Tensor
    positions: Tensor
    row_ids: Tensor
    """All int64 ``[bucket.num_choices]``."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """What a replay leaves behind, in the same memory every time. Rows of ``bucket.queries`` entries each, or of
    ``bucket.choices``, ``C`` together."""

    bucket: Bucket
    inputs: Tensor
    """int64 ``[2, bucket.rows]``: each row's id, and how many tokens it has after its first one."""
    batch: ForwardBatch
    after: ChosenAfter
    logits: Tensor
    """float32 ``[C, vocab]``; adjusted where a row's request adjusts them."""
    chosen: Tensor
    """int64 ``[C + bucket.rows]``: :attr:`tokens`, then :attr:`accepted`."""
    logprobs: Tensor
    """float32 ``[C]``: of the chosen tokens, where a request asked for logprobs."""
    aux_hidden_states: tuple[Tensor, ...]
    prepared: tuple[Any, ...]
    """What the attention kernel prepared, by KV group: the graph reads its tensors."""

    @property
    def tokens(self) -> Tensor:
        """int64 ``[C]``: the chosen ones, already written as inputs of the next step."""
        return self.chosen[: len(self.logits)]

    @property
    def accepted(self) -> Tensor:
        """int64 ``[bucket.rows]``: drafts that are accepted; none of a prompt."""
        return self.chosen[len(self.logits) :]

    @property
    def last(self) -> Tensor:
        """int64 ``[bucket.rows]``: which of its queries is a row's last token, accepted drafts included."""
        return self.inputs[1] if self.bucket.prompt else self.accepted

    @property
    def starts(self) -> Tensor:
        """int64 ``[bucket.rows]``: position of each row's first token."""
        return self.batch.positions.view(self.bucket.rows, self.bucket.queries)[:, 0]

    @property
    def step_inputs(self) -> StepInputs:
        """Of the bucket's rows, nobody's included."""
        known = self.inputs[1] + 1 if self.bucket.prompt else torch.ones_like(self.inputs[0])
        return StepInputs(self.batch, self.inputs[0], self.starts, known)


@dataclass(frozen=True, slots=True)
class _Graph:
    step: Replay
    sample: dict[bool, Replay]
    """After the step: without and with what adjusts logits."""
    logprobs: Replay
    """After both: of the chosen tokens."""
    captured: CapturedStep


ALL_SAMPLING = Feature.SAMPLED | Feature.FILTERED
ALL_ADJUSTING = Feature.BIASED | Feature.PENALISED | Feature.MIN_TOKENS


def row_buckets(max_requests: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: all powers of two up to 8, then every eighth, then every sixteenth above 64."""
    sizes = {1, 2, 4, max_requests}
    sizes.update(range(8, min(max_requests, 64) + 1, 8))
    sizes.update(range(80, max_requests + 1, 16))
    return tuple(sorted(n for n in sizes if n <= max_requests))


def query_buckets(max_draft_tokens: int) -> tuple[int, ...]:
    """Tokens per row worth a graph: one, and with drafts the powers of two and the most there can be."""
    most = max_draft_tokens + 1
    return tuple(sorted({1, most, *(n for n in (2, 4, 8, 16) if n < most)}))


READ_ONCE = 64
"""Up to so many tokens padding changes little: packed weights have kernels for 16, 32 and 64 rows, whatever comes, and
others are read longer than they are multiplied."""
LAUNCH_S = 4e-4
"""In which the host launches a layer, op by op: a prompt of 512 tokens took a model of 16 layers 7.2 ms on an H100, 7.5
and 10.2 on an H200, 1.5 of them at its rate of products (docs/measured.md)."""
FLOPS = {(8, 0): 1.5e14, (9, 0): 3.5e14, (10, 0): 3.5e14}
"""FLOP/s that products are assumed to reach, by compute capability: about half of the data sheets' of A100 and H100
PCIe. Of other GPUs nothing is assumed."""


def prompt_buckets(
    layer_flops: Callable[[int], float], most_tokens: int, capability: tuple[int, int] | None
) -> tuple[Bucket, ...]:
    """Prompts worth a graph: of one request, of up to ``most_tokens``. Padding to such a shape costs little up to
    :data:`READ_ONCE`, and as long as the device computes a layer in less time than the host takes to launch it.
    ``layer_flops``: operations of a layer for so many tokens."""
    launched = LAUNCH_S * FLOPS.get(capability or (0, 0), 0.0)
    free = (n for n in (16, 32, 64, 128, 256, 512) if n <= READ_ONCE or layer_flops(n) <= launched)
    return tuple(Bucket(1, n, prompt=True) for n in free if n <= most_tokens)


class StepGraphs:
    """The registry. Captured graphs read and write the tables and the cache they were made with.

    All graphs leave their results in the same tensors, as large as the largest bucket: what a graph allocates itself
    can so be reused by the next one. Results must be used, or copied, in stream order before the next replay.
    """

    def __init__(
        self,
        model: LoweredModel,
        kv: KVCache,
        tables: DeviceTables,
        aux_layers: Sequence[int],
        buckets: Iterable[Bucket],
        capture: Capture,
    ) -> None:
        self._model = model
        self._kv = kv
        self.tables = tables
        self._aux_layers = tuple(aux_layers)
        self._capture: Capture | None = capture
        self._todo = sorted(buckets, key=lambda bucket: (-bucket.tokens, -bucket.rows))
        assert all(bucket.queries < tables.tokens.shape[1] for bucket in self._todo), "padding has places in the tables"
        self._graphs: dict[Bucket, _Graph] = {}
        self._inputs: dict[Bucket, list[int]] = {}
        """What a bucket's inputs hold since it was replayed."""
        self._most_tokens = max((bucket.tokens for bucket in self._todo), default=0)
        self._most_choices = max((bucket.num_choices for bucket in self._todo), default=0)
        self._chosen = torch.zeros(2 * self._most_choices, dtype=torch.int64, device=tables.device)
        self._logprobs = torch.zeros(self._most_choices, dtype=torch.float32, device=tables.device)
        self._logits: Tensor | None = None
        self._aux: tuple[Tensor, ...] | None = None

    @property
    def attention(self) -> AttentionKernel:
        return self._model.attention

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Captured, from the smallest to the largest."""
        return tuple(sorted(self._graphs, key=lambda bucket: (bucket.tokens, bucket.rows)))

    def capture(self, on_progress: Callable[[float, str], None] = lambda fraction, what: None) -> None:
        """Capture every bucket. Once."""
        capture, self._capture = self._capture, None
        assert capture is not None, "graphs are captured once, before the engine is ready"
        for done, bucket in enumerate(self._todo):
            on_progress(done / len(self._todo), str(bucket))
            self._graphs[bucket] = self._graph(bucket, capture)

    def find(self, rows: Sequence[StepRow]) -> Bucket | None:
        """The smallest bucket that holds these rows, if there is one: of decode steps, or of known tokens of one row,
        such as a prompt that is alone."""
        if not rows or not all(row.samples for row in rows):
            return None
        prompt = any(row.num_tokens > 1 for row in rows)
        if prompt and (len(rows) > 1 or rows[0].num_drafts):
            return None
        most = max(row.num_queries for row in rows)
        fitting = (b for b in self._graphs if b.prompt == prompt and b.rows >= len(rows) and b.queries >= most)
        found = min(fitting, key=lambda bucket: (bucket.tokens, bucket.rows), default=None)
        if found is None or not prompt:
            return found
        (row,) = rows
        has_places = row.max_start + found.queries < self.tables.tokens.shape[1]  # for padding, too
        wants_logprobs = self.tables.requests[row.row_id].sampling.prompt_logprobs is not None
        return found if has_places and not wants_logprobs else None

    @torch.inference_mode()
    def replay(self, bucket: Bucket, rows: Sequence[StepRow]) -> tuple[CapturedStep, Mapping[int, str]]:
        """Run a batch that :meth:`find` found the bucket for. Also why rows cannot follow their grammar, by number.
        Where a row has one, this waits for the tokens of the step before."""
        graph, features = self._graphs[bucket], self.tables.features(rows)
        watched = self.tables.watch(rows)
        idle = bucket.rows - len(rows)
        ids = [row.row_id for row in rows] + [self.tables.nobody] * idle
        inputs = ids + [row.num_queries - 1 for row in rows] + [0] * idle
        if self._inputs.get(bucket) != inputs:
            refill(graph.captured.inputs, inputs)
            self._inputs[bucket] = inputs
        graph.step()
        masks = None if watched is None else watched.masks(self.tables.device, bucket.choices)
        if masks is not None:
            masks.apply_(graph.captured.logits)
        if features & (ALL_SAMPLING | ALL_ADJUSTING | Feature.CONSTRAINED):
            graph.sample[features.adjusts]()
        if Feature.LOGPROBS in features:
            graph.logprobs()
        return graph.captured, {} if masks is None else masks.errors

    def captured(self, bucket: Bucket) -> CapturedStep:
        """What a replay of a captured bucket leaves."""
        return self._graphs[bucket].captured

    def _graph(self, bucket: Bucket, capture: Capture) -> _Graph:
        device = self.tables.device
        inputs = torch.zeros(2, bucket.rows, dtype=torch.int64, device=device)
        inputs[0] = self.tables.nobody
        batch = static_batch(bucket, self.tables)
        after = static_chosen_after(bucket, batch)
        prepared = prepared_of(self._model.attention, batch.attention)
        found: list[CapturedStep] = []

        def step() -> None:
            fill(batch, inputs, self.tables)
            hidden, aux = self._model.run(batch, self._kv, prepared, self._aux_layers)
            if bucket.prompt:
                hidden = hidden[fill_chosen_after(after, batch, inputs)]
            memory = None if self._logits is None else self._logits[: len(hidden)]
            logits, tokens = self._model.greedy(hidden, memory)
            captured = self._keep(bucket, inputs, batch, after, prepared, logits, aux)
            self._settle(captured, self.tables.agreed(tokens))
            found[:] = [captured]

        def sample(features: Feature) -> None:
            captured = found[0]
            if features.adjusts:  # the step wrote its own tokens over the drafts, which penalties count
                self.tables.tokens[after.row_ids, after.positions] = after.token_ids
            chosen = self.tables.sampling.at(after.row_ids, after.positions, features)
            tokens, _ = choose_tokens(
                captured.logits,
                chosen,
                self.tables.sampling,
                self.tables.tokens,
                self.tables.tokens.shape[1],
                on_triton=self._model.on_triton,
            )
            self._settle(captured, self.tables.agreed(tokens))

        def logprobs() -> None:
            captured = found[0]
            own = captured.logits.gather(1, captured.tokens.clamp(min=0)[:, None]).squeeze(1)
            torch.sub(own, captured.logits.logsumexp(dim=1), out=captured.logprobs)

        with torch.inference_mode():
            replay = capture(step)
            both = {False: ALL_SAMPLING, True: ALL_SAMPLING | ALL_ADJUSTING}
            samplers = {adjusts: capture(partial(sample, features)) for adjusts, features in both.items()}
            of_tokens = capture(logprobs)
        return _Graph(replay, samplers, of_tokens, found[0])

    def _settle(self, captured: CapturedStep, tokens: Tensor) -> None:
        """Accept drafts, write the chosen tokens as inputs of the next step, and move each row on. A prompt has
        one choice, and so nothing to accept. Doing it again with other tokens replaces what was done."""
        after, tables = captured.after, self.tables
        if runs_triton(tables.device):
            from engine.kernels.triton.step_outputs import settle_step  # Triton is imported only where it runs

            settle_step(
                captured.inputs, after.token_ids, after.positions, tokens, captured.tokens, captured.accepted,
                tables.tokens, tables.computed, tables.nobody,
            )  # fmt: skip
            return
        shape = captured.bucket.rows, captured.bucket.choices
        ids, num_drafts = captured.inputs.unbind()
        captured.tokens.copy_(tokens)
        accepted = accepted_drafts(after.token_ids.view(shape), tokens.view(shape), num_drafts)
        captured.accepted.copy_(accepted)
        tables.write(after.row_ids, after.positions + 1, tokens)
        first = after.positions.view(shape)[:, 0]
        tables.computed[ids] = torch.where(ids == tables.nobody, 0, first + 1 + accepted)

    def _keep(
        self,
        bucket: Bucket,
        inputs: Tensor,
        batch: ForwardBatch,
        after: ChosenAfter,
        prepared: tuple[Any, ...],
        logits: Tensor,
        aux: Sequence[Tensor],
    ) -> CapturedStep:
        """The results, where every graph leaves them: hidden states are copied there, logits are made there. The first
        bucket makes that memory while it warms up, so before anything is captured."""
        if self._logits is None or self._aux is None:
            self._logits = logits.new_zeros(self._most_choices, logits.shape[1])
            self._logits[: len(logits)] = logits
            self._aux = tuple(hidden.new_zeros(self._most_tokens, hidden.shape[1]) for hidden in aux)
        count = bucket.num_choices
        kept = CapturedStep(
            bucket,
            inputs,
            batch,
            after,
            self._logits[:count],
            self._chosen[: count + bucket.rows],
            self._logprobs[:count],
            tuple(hidden[: bucket.tokens] for hidden in self._aux),
            prepared,
        )
        for target, source in zip(kept.aux_hidden_states, aux, strict=True):
            target.copy_(source)
        return kept


_ALIGNED = 16
"""Tensors of each KV group begin at multiples of so many bytes: kernels are compiled anew for others."""


def static_batch(bucket: Bucket, tables: DeviceTables) -> ForwardBatch:
    """The tensors that captured steps of a shape read, which :func:`fill` fills. Those of all KV groups lie in one, so
    that one kernel does."""
    device, (groups, _, width) = tables.device, tables.block_tables.shape
    flat = [torch.zeros(bucket.tokens, dtype=torch.int64, device=device) for _ in range(3)]
    token_ids, positions, row_ids = flat
    mappings = apart(groups, (bucket.tokens,), torch.int64, device)
    q_lens = (bucket.queries,) * bucket.rows
    q_starts = torch.arange(0, bucket.tokens + 1, bucket.queries, dtype=torch.int32, device=device)
    kv_lens = torch.full((bucket.rows,), bucket.queries, dtype=torch.int32, device=device)
    attention = []
    for share, blocks in zip(
        tables.block_shares, apart(groups, (bucket.rows, width), torch.int32, device), strict=True
    ):
        whole = AttentionBatch(q_lens, q_lens, blocks, q_starts, kv_lens, tables.block_size)
        attention.append(whole if share is None else _of_share(whole, share))
    return ForwardBatch(token_ids, positions, mappings, tuple(attention), row_ids)


def static_chosen_after(bucket: Bucket, batch: ForwardBatch) -> ChosenAfter:
    """All tokens of a decode step; of prompts tensors that :func:`fill_chosen_after` fills."""
    if not bucket.prompt:
        return ChosenAfter(batch.token_ids, batch.positions, batch.row_ids)
    return ChosenAfter(*torch.zeros(3, bucket.rows, dtype=torch.int64, device=batch.token_ids.device).unbind())


def fill_chosen_after(after: ChosenAfter, batch: ForwardBatch, inputs: Tensor) -> Tensor:
    """With the last token of each row of a prompt. Returns where they are in the batch: int64 ``[rows]``."""
    index = batch.attention[0].q_starts[:-1] + inputs[1]
    torch.index_select(batch.token_ids, 0, index, out=after.token_ids)
    torch.index_select(batch.positions, 0, index, out=after.positions)
    torch.index_select(batch.row_ids, 0, index, out=after.row_ids)
    return index


def _of_share(whole: AttentionBatch, share: BlockShare) -> AttentionBatch:
    """The same where ranks share out the tokens of a group: lengths are its own."""
    kv_lens = torch.zeros_like(whole.kv_lens_device)
    return replace(whole, kv_lens_device=kv_lens, block_size=share.size, key_ends=kv_lens.new_zeros(sum(whole.q_lens)))


def apart(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: str, make: Callable[..., Tensor] = torch.zeros
) -> tuple[Tensor, ...]:
    """So many contiguous tensors, equally far from each other in memory; what they hold is up to ``make``."""
    size, step = math.prod(shape), _ALIGNED // dtype.itemsize
    together = make(count, -(-size // step) * step, dtype=dtype, device=device)
    return tuple(row[:size].view(shape) for row in together)


def fill(batch: ForwardBatch, inputs: Tensor, tables: DeviceTables) -> None:
    """Everything a captured step reads, from ``inputs`` (see :attr:`CapturedStep.inputs`) and the tables. Padding after
    a row's last token has slots of the row, and is nobody's: experts of nobody's tokens are not counted."""
    if runs_triton(tables.device):
        from engine.kernels.triton.step_inputs import fill_step  # Triton is imported only where it runs

        fill_step(
            inputs, tables.tokens, tables.block_tables, tables.computed, tables.block_size,
            batch.token_ids, batch.positions, batch.row_ids, batch.slot_mappings, batch.attention, tables.nobody,
        )  # fmt: skip
        for mapping, share in zip(batch.slot_mappings, tables.block_shares, strict=True):
            if share is not None:
                mapping.copy_(share.slots(mapping // tables.block_size, mapping % tables.block_size))
        _fill_key_ends(batch, tables)
        return
    rows = inputs.shape[1]
    queries = batch.token_ids.shape[0] // rows
    steps, starts = torch.arange(queries, device=tables.device), tables.computed[inputs[0]]
    row_ids = inputs[0].repeat_interleave(queries)
    torch.add(starts[:, None], steps, out=batch.positions.view(rows, queries))
    batch.token_ids.copy_(tables.tokens[row_ids, batch.positions].clamp(min=0))
    for mapping, found in zip(batch.slot_mappings, tables.slot_mappings(row_ids, batch.positions), strict=True):
        mapping.copy_(found)
    batch.row_ids.copy_(torch.where((steps <= inputs[1][:, None]).flatten(), row_ids, tables.nobody))
    for own, blocks in zip(batch.attention, tables.block_tables, strict=True):
        torch.index_select(blocks, 0, inputs[0], out=own.block_tables)
    for own in batch.attention:
        own.kv_lens_device.copy_(starts + queries)
    _fill_key_ends(batch, tables)


def _fill_key_ends(batch: ForwardBatch, tables: DeviceTables) -> None:
    """How many keys of this rank each query sees, where ranks share out the tokens of a group."""
    for own, share in zip(batch.attention, tables.block_shares, strict=True):
        if share is not None:
            assert own.key_ends is not None
            own.key_ends.copy_(share.length(batch.positions + 1))
            torch.index_select(own.key_ends, 0, own.q_starts[1:] - 1, out=own.kv_lens_device)


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def cuda_capture() -> Capture:
    """Captures CUDA graphs that share one memory pool."""
    pool, stream = torch.cuda.graph_pool_handle(), _capture_stream()

    def capture(step: Callable[[], None]) -> Replay:
        # Kernels are compiled and libraries make their workspaces the first time; neither may happen in a capture.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # A product keeps its stream's workspace, and anyone in this process may free it (``torch.compile`` does). Made
        # anew inside the capture, it lives in the graphs' own pool, as long as they do.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
        return graph.replay

    return capture
