"""What a drafter on the device is lent: the target's ends and layers, memory in the cache, and a loader of weights.
What comes next, the plugin of slot ``drafter`` says.

Fulfils :class:`engine.contracts.drafter.DraftEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.tensors import Checkpoint, CheckpointError, name_list, open_checkpoint
from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.drafter import ChainFirst, ChainStep, DraftChain, DraftRows, DraftTokens
from engine.contracts.graph import Graph, Node
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Attention, Linear, LinearSpec, Norm, Rope
from engine.contracts.quantizer import Quantizer
from engine.drafting.chains import CapturedChain, name_of
from engine.drafting.layers import Layers
from engine.drafting.metadata import CapturedMetadata, chain_lengths, place_chain
from engine.kernels.backends import fused_graph, rotations
from engine.kernels.context import Rotate
from engine.kernels.cpu.captured import Captured
from engine.kernels.cpu.row_ops import Table, cat
from engine.kernels.loading import Loader
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.model import LoweredModel, entrance
from engine.kernels.settings import Kernels, Lowering
from engine.kernels.torch.patterns import lower_rotations
from engine.kv.cache import KVCache
from engine.models.manifest import Manifest, ManifestTensor, unread_names
from engine.sampling.choose import choose
from engine.sampling.state import Feature, SamplingBatch
from engine.step.graphs import apart
from engine.step.tables import DeviceTables

_ANY = 0
"""The draft where logits are not finite: any token will do, it is rejected."""


@dataclass(frozen=True, slots=True)
class DraftLoading:
    """How the weights of a drafter are loaded: as the plan says for the target's."""

    dtype: str
    max_len: int
    """Most tokens of a sequence that the plan serves."""
    attention: AttentionKernel
    kv_format: KVFormat
    kernels: Kernels
    describe: Callable[[ModelFacts], Graph]
    quantizer: Callable[[ModelFacts], Quantizer]
    """The plan's quantizer, built for another checkpoint."""


class DraftEngine:
    """See the contract. Everything here runs on the device's thread."""

    def __init__(self, target: LoweredModel, kv: KVCache, tables: DeviceTables, loading: DraftLoading) -> None:
        self.device = tables.device
        self.dtype: torch.dtype = getattr(torch, loading.dtype)
        self.embed: Callable[[Tensor], Tensor] = target.embedding_table or target.embed
        self.enter = entrance(target.graph, target.embedding)
        self.head = target.head
        self.lm_head = target.lm_head
        self.describe = loading.describe
        self._target = target
        self._kv = kv
        self._tables = tables
        self._loading = loading
        self._programs = None if target.small_steps is None else target.small_steps.programs
        self.cat = cat
        self._counting = torch.arange(tables.nobody + 2, dtype=torch.int32, device=tables.device)
        """Where the queries of rows with one each begin."""

    def target_layers(self, count: int) -> Layers:
        layers, target = self._target.layers, self._target
        after = layers[count].residual if count < len(layers) else target.graph.hidden
        assert after is not None
        return Layers(target.graph.entering, layers[:count], after, target.rotate, target.attention, self._kv)

    def open(self, model: ModelFacts) -> Weights:
        return Weights(model, self._loading, self._kv, self.device, len(self._target.graph.caches))

    def captured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._programs is None:
            return function
        # It may be anybody's: whatever it raises is why it is no program, and it is called with tensors then.
        return Captured(name_of(function), function, self._programs, refusals=Exception)

    def chain(self, step: ChainStep, first: ChainFirst | None = None, ids: Tensor | None = None) -> DraftChain:
        def plain(rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
            return self._chain(step, first, ids, rows, hidden)

        if self._programs is None:
            return plain
        return CapturedChain(step, first, ids, plain, self._programs, self._tables)

    def choose(self, logits: Tensor, rows: DraftRows, ids: Tensor | None = None) -> Tensor:
        num_draft_tokens = logits.shape[0] // len(rows.index)
        row_ids = rows.row_ids.repeat_interleave(num_draft_tokens)
        positions = (rows.positions[:, None] + torch.arange(num_draft_tokens, device=self.device)).flatten()
        batch = self._tables.sampling.at(row_ids, positions, _features(rows)) if self._samples(rows) else None
        return self._choose(logits, batch, ids).view(-1, num_draft_tokens)

    def _choose(self, logits: Tensor, batch: SamplingBatch | None, ids: Tensor | None) -> Tensor:
        """The token after each position."""
        if self._target.on_triton:
            from engine.sampling.triton.sampler import sample_on_device  # Triton is imported only where it runs

            return sample_on_device(logits.float(), batch, ids, broken=_ANY)
        assert batch is not None
        return choose(logits.float(), batch, ids).clamp_(min=_ANY)

    def _samples(self, rows: DraftRows) -> bool:
        """Whether choosing reads sampling parameters: on Triton kernels greedy rows have none to read."""
        return rows.sampled or not self._target.on_triton

    def _sampling_of_chain(self, rows: DraftRows) -> list[SamplingBatch | None]:
        """Parameters of each draft of all chains, gathered at once: noise differs from position to position."""
        count, most = len(rows.index), rows.most_draft_tokens
        if not self._samples(rows):
            return [None] * most
        positions = (rows.positions + torch.arange(most, device=self.device)[:, None]).flatten()
        batch = self._tables.sampling.at(rows.row_ids.repeat(most), positions, _features(rows))
        return [batch.take(slice(j * count, (j + 1) * count)) for j in range(most)]

    def _chain(
        self,
        step: ChainStep,
        first: ChainFirst | None,
        ids: Tensor | None,
        rows: DraftRows,
        hidden: Tensor | None,
    ) -> DraftTokens:
        if not rows.index:
            return DraftTokens(rows.tokens[:, None])
        state = None if hidden is None else hidden[rows.last]
        sampling, drafts = self._sampling_of_chain(rows), list[Tensor]()

        def add(logits: Tensor) -> Tensor:
            drafts.append(self._choose(logits, sampling[len(drafts)], ids))
            return drafts[-1]

        tokens = rows.tokens
        if first is not None:
            assert state is not None, "the first draft is computed from hidden states"
            tokens = add(first(state))
        for metadata in self.chain_metadata(rows, rows.most_draft_tokens - len(drafts)):
            logits, state = step(tokens, state, metadata)
            tokens = add(logits)
        return DraftTokens(torch.stack(drafts, dim=1))

    def chain_metadata(self, rows: DraftRows, steps: int) -> list[ForwardMetadata]:
        capture: CapturedMetadata | None = rows.capture
        if capture is not None:
            return capture.chain_metadata(rows, steps)
        if not steps:
            return []
        tables, ends = self._tables, rows.lengths
        blocks = min(-(-(max(ends, default=0) + steps) // tables.block_size), tables.block_tables.shape[2])
        lengths = chain_lengths(steps, len(ends), self.device)
        row_tables = apart(len(tables.block_tables), (len(ends), blocks), torch.int32, self.device, torch.empty)
        placed = place_chain(tables, rows, lengths, row_tables)
        ones, q_starts = (1,) * len(ends), self._counting[: len(ends) + 1]

        def attention(j: int) -> tuple[AttentionBatch, ...]:
            """Of the ``j``-th step."""
            bounds, size = tuple([end + j + 1 for end in ends]), tables.block_size
            return tuple([AttentionBatch(ones, bounds, own, q_starts, lengths[j], size) for own in row_tables])

        return [placed.at(j, attention(j), None) for j in range(steps)]

    def block_metadata(self, rows: DraftRows, num_tokens: int) -> ForwardMetadata:
        capture: CapturedMetadata | None = rows.capture
        if capture is not None:
            return capture.block_metadata(rows, num_tokens)
        positions = (rows.positions[:, None] + torch.arange(num_tokens, device=self.device)).flatten()
        flat = rows.row_ids.repeat_interleave(num_tokens)
        ends = tuple(length + num_tokens for length in rows.lengths for _ in range(num_tokens))
        # Every token is a row of its own, so that it sees the keys after it, too: all are written before any is read.
        q_starts = torch.arange(len(ends) + 1, dtype=torch.int32, device=self.device)
        kv_lens = (rows.positions + num_tokens).repeat_interleave(num_tokens).to(torch.int32)
        ones, size = (1,) * len(ends), self._tables.block_size
        tables = self._tables.blocks_of(flat, max(ends, default=0))
        batches = tuple([AttentionBatch(ones, ends, blocks, q_starts, kv_lens, size) for blocks in tables])
        return ForwardMetadata(positions, self._tables.slot_mappings(flat, positions), batches)


def _features(rows: DraftRows) -> Feature:
    """What drafts of these rows are chosen by."""
    return Feature.SAMPLED | Feature.FILTERED if rows.sampled else Feature.NONE


class Weights:
    """See :class:`engine.contracts.drafter.DraftWeights`."""

    def __init__(self, model: ModelFacts, loading: DraftLoading, kv: KVCache, device: str, first_cache: int) -> None:
        """``first_cache``: of the drafter's own."""
        self._model = model
        self._first_cache = first_cache
        self._loading = loading
        self._kv = kv
        self._device = device
        self._checkpoint: Checkpoint = open_checkpoint(model.path)
        self._quantizer = loading.quantizer(model)
        self._used: set[str] = set()
        self._table: tuple[str, Tensor] | None = None
        self._rotations: list[tuple[tuple[Rope, ...], Rotate]] = []
        self.names = frozenset(self._checkpoint.names)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        self._require({name})
        return self._loader().read(ManifestTensor(name, shape))

    def embedding(self, name: str, vocab_size: int, size: int) -> Callable[[Tensor], Tensor]:
        weight = f"{name}.weight"
        table = self.tensor(weight, (vocab_size, size))
        table = table.to(device=self._device, dtype=getattr(torch, self._loading.dtype))
        self._table = (weight, table)
        return Table(table)

    def enter(self, graph: Graph) -> Callable[[Tensor], tuple[Tensor, ...]]:
        self._require_all(graph.embed.nodes)
        loader = self._loader(graph)
        found, *_ = fused_graph(graph, loader.lowering)
        block = loader.outside(graph.embed, found)
        self._table = loader.table
        return entrance(graph, block)

    def norm(self, op: Norm) -> Callable[[Tensor], Tensor]:
        return self._single(op)

    def norms(
        self, ops: tuple[Norm, Norm], embed: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        self._require_all(tuple(Node(op, (), ()) for op in ops))
        return self._loader().joined_norms(ops, embed)

    def linear(self, spec: LinearSpec) -> Callable[[Tensor], Tensor]:
        call = self._single(Linear(spec))
        return call if len(spec.parts) == 1 else lambda x: cat(call(x))

    def _single(self, op: Norm | Linear) -> Callable[[Tensor], Any]:
        self._require_all((Node(op, (), ()),))
        call = self._loader().single(op)
        return lambda x: call(None, x)

    def layers(self, graph: Graph, first: int = 0) -> Layers:
        nodes = [node for layer in graph.layers for node in layer.nodes]
        for node in nodes:
            if isinstance(node.op, Attention):
                self._check_heads(node.op)
        self._require_all(nodes)
        self._used |= unread_names(graph, self.names)
        loader = self._loader(graph, first)
        found = list(fused_graph(graph, loader.lowering))[1:-1]
        layers = [loader.layer(layer, fused) for layer, fused in zip(graph.layers, found, strict=True)]
        inputs = graph.entering if graph.embed.nodes else graph.inputs
        rotate = self._rotations_of(loader.lowering)
        return Layers(inputs, layers, graph.hidden, rotate, self._loading.attention, self._kv)

    def _check_heads(self, op: Attention) -> None:
        """Raise ``ValueError`` where the attention kernel cannot compute so many heads."""
        can, heads = self._loading.attention.capabilities.heads_per_kv_head, op.num_heads // op.num_kv_heads
        if can is not None and heads != can:
            raise ValueError(
                f"drafter.path={self._model.path}: {heads} query heads share a key-value head (num_attention_heads="
                f"{op.num_heads}, num_key_value_heads={op.num_kv_heads}), expected {can}, as in the model the "
                "attention kernel is built for; choose another drafter.path or attention_kernel"
            )

    def _rotations_of(self, lowering: Lowering) -> Rotate:
        """Layers that rotate alike share their tables."""
        for kinds, rotate in self._rotations:
            if kinds == lowering.rotations:
                return rotate
        rotate = lower_rotations(lowering, self._loading.max_len)
        self._rotations.append((lowering.rotations, rotate))
        return rotate

    def head(self, graph: Graph) -> Callable[[Tensor], Tensor]:
        self._require_all(graph.head.nodes)
        loader = self._loader(graph)
        *_, found = fused_graph(graph, loader.lowering)
        return loader.outside(graph.head, found).of_rows

    def finish(self, ignored: Sequence[str] = ()) -> None:
        left = {name for name in self.names - self._used if not name.endswith(tuple(ignored) or ("\0",))}
        if left:
            raise CheckpointError(f"drafter.path={self._model.path}: tensors nobody asked for: {name_list(left)}")

    def _require(self, names: set[str]) -> None:
        missing = names - self.names
        if missing:
            raise CheckpointError(f"drafter.path={self._model.path}: tensors missing: {name_list(missing)}")

    def _require_all(self, nodes: Iterable[Node]) -> None:
        """Every tensor that some nodes need."""
        for node in nodes:
            for weight in Manifest(self._quantizer, self.names).of(node):
                self._require({tensor.name for tensor in weight.tensors if tensor.required})

    def _loader(self, graph: Graph | None = None, first: int = 0) -> Loader:
        loading = self._loading
        lowering = Lowering(
            device=self._device,
            dtype=getattr(torch, loading.dtype),
            attention=loading.attention,
            kv_format=loading.kv_format,
            rotations=() if graph is None else rotations(graph),
            kernels=loading.kernels,
            first_cache=self._first_cache + first,
        )
        return Loader(self._checkpoint, self._quantizer, lowering, used=self._used, table=self._table)
