"""What a drafter on the device is lent: the target's ends and layers, room in the cache, and a loader of weights.

Fulfils :class:`engine.contracts.drafter.DraftEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LayerOp, LinearSpec, LMHead, ModelOps, NormSpec
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import Quantizer
from engine.execution.checkpoint import Checkpoint, CheckpointError, name_list, open_checkpoint
from engine.execution.kv_cache import KVCache
from engine.execution.loading import Loader, linear_names, linear_of
from engine.execution.lowering import (
    Kernels,
    Lowering,
    ReplayedLayers,
    Where,
    can_replay,
    lower_head,
    lower_rotations,
    op_norms,
    rope_kinds,
)
from engine.execution.model import LoweredModel, LoweredOp, StepContext
from engine.execution.tables import DeviceTables
from engine.execution.transfer import upload

Rotate = Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]


@dataclass(frozen=True, slots=True)
class DraftLoading:
    """How the weights of a drafter are loaded: as the plan says for the target's."""

    dtype: str
    max_len: int
    """Most tokens of a request."""
    attention: AttentionKernel
    kv_format: KVFormat
    parallelism: Parallelism
    kernels: Kernels
    describe: Callable[[ModelFacts], ModelOps]
    quantizer: Callable[[ModelFacts], Quantizer]
    """The plan's quantizer, built for another checkpoint."""


@dataclass(slots=True)
class Place:
    """Where some tokens are: what layers need beside the tokens themselves."""

    positions: Tensor
    """int64 ``[num_tokens]``"""
    slot_mapping: Tensor
    attention: AttentionBatch
    staged: Any = None
    """By the attention kernel, when it is first needed."""
    chain: _Chain | None = None
    """The places this one was made with, and which of them it is."""
    index: int = 0

    def context(self, rotate: Rotate, attention: AttentionKernel, kv: KVCache) -> StepContext:
        if self.staged is None:
            self.staged = attention.stage(self.attention)
        return StepContext(self.rotations(rotate), self.slot_mapping, self.staged, kv)

    def rotations(self, rotate: Rotate) -> tuple[tuple[Tensor, Tensor], ...]:
        return rotate(self.positions) if self.chain is None else self.chain.rotations(rotate)[self.index]


@dataclass(slots=True)
class _Chain:
    """Places one behind the other share the tables of their rotations."""

    positions: Tensor
    """int64 ``[steps, num_rows]``"""
    _by_layers: dict[int, list[tuple[tuple[Tensor, Tensor], ...]]] = field(default_factory=dict)

    def rotations(self, rotate: Rotate) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Tables by step."""
        found = self._by_layers.get(id(rotate))
        if found is None:
            steps, rows = self.positions.shape
            tables = rotate(self.positions.flatten())
            cuts = [slice(step * rows, (step + 1) * rows) for step in range(steps)]
            found = [tuple((cos[cut], sin[cut]) for cos, sin in tables) for cut in cuts]
            self._by_layers[id(rotate)] = found
        return found


class Layers:
    """Layers on the cache. Fulfils :class:`engine.contracts.drafter.DraftLayers`."""

    def __init__(
        self,
        layers: Sequence[Sequence[LoweredOp]],
        rotate: Rotate,
        attention: AttentionKernel,
        kv: KVCache,
        replayed: bool,
    ) -> None:
        """``replayed``: few tokens take all layers at once, see :class:`engine.execution.lowering.ReplayedLayers`."""
        self._layers = layers
        self._rotate = rotate
        self._attention = attention
        self._kv = kv
        self._replayed = ReplayedLayers(layers, attention) if replayed else None

    def run(self, residual: Tensor, carry: Tensor, place: Place) -> Tensor:
        if self._replayed is not None and self._replayed.can_run(residual.shape[0], self._kv):
            where = Where(place.rotations(self._rotate), place.slot_mapping, place.attention)
            return self._replayed.run(residual, carry, where, self._kv)[0]
        context = place.context(self._rotate, self._attention, self._kv)
        for layer in self._layers:
            for op in layer:
                residual, carry = op(residual, carry, context)
            carry = residual
        return residual

    def write(self, carry: Tensor, place: Place) -> None:
        context = place.context(self._rotate, self._attention, self._kv)
        self._layers[0][0](carry, carry, context)


class DraftEngine:
    """See the contract. Everything here runs on the device's thread."""

    def __init__(self, target: LoweredModel, kv: KVCache, tables: DeviceTables, loading: DraftLoading) -> None:
        self.device = tables.device
        self.dtype: torch.dtype = getattr(torch, loading.dtype)
        self.embed = target.embed
        self.head = target.head
        self.unembed = target.unembed
        self.describe = loading.describe
        self._target = target
        self._kv = kv
        self._tables = tables
        self._loading = loading

    def target_layers(self, count: int) -> Layers:
        target, replayed = self._target, self._target.small_steps is not None
        return Layers(target.layers[:count], target.rotate, target.attention, self._kv, replayed)

    def open(self, model: ModelFacts) -> Weights:
        return Weights(model, self._loading, self._kv, self.device)

    def places(self, slots: Tensor, lengths: Sequence[int], steps: int) -> list[Place]:
        starts = upload(lengths, torch.int64, self.device)
        positions = starts + torch.arange(steps, device=self.device)[:, None]
        mapping = self._tables.slot_mapping(slots.expand_as(positions), positions)
        kv_lens = (positions + 1).to(torch.int32)
        tables = self._block_tables(slots, max(lengths, default=0) + steps)
        q_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
        ones, chain = (1,) * len(lengths), _Chain(positions)
        return [
            Place(
                positions[j],
                mapping[j],
                AttentionBatch(
                    q_lens=ones,
                    kv_lens=tuple(length + j + 1 for length in lengths),
                    block_tables=tables,
                    q_starts=q_starts,
                    kv_lens_device=kv_lens[j],
                    block_size=self._tables.block_size,
                ),
                chain=chain,
                index=j,
            )
            for j in range(steps)
        ]

    def block(self, slots: Tensor, lengths: Sequence[int], width: int) -> Place:
        rows = len(lengths)
        starts = upload(lengths, torch.int64, self.device)[:, None]
        positions = (starts + torch.arange(width, device=self.device)).flatten()
        flat = slots.repeat_interleave(width)
        ends = tuple(length + width for length in lengths for _ in range(width))
        # Every token is a row of its own, so that it sees the keys behind it, too: all are written before any is read.
        attention = AttentionBatch(
            q_lens=(1,) * (rows * width),
            kv_lens=ends,
            block_tables=self._block_tables(flat, max(ends, default=0)),
            q_starts=torch.arange(rows * width + 1, dtype=torch.int32, device=self.device),
            kv_lens_device=upload(ends, torch.int32, self.device),
            block_size=self._tables.block_size,
        )
        return Place(positions, self._tables.slot_mapping(flat, positions), attention)

    def place(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Place:
        flat_slots, positions = self._flat(slots, starts, counts)
        ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
        attention = AttentionBatch(
            q_lens=tuple(counts),
            kv_lens=ends,
            block_tables=self._block_tables(upload(slots, torch.int64, self.device), max(ends, default=0)),
            q_starts=upload(list(accumulate(counts, initial=0)), torch.int32, self.device),
            kv_lens_device=upload(ends, torch.int32, self.device),
            block_size=self._tables.block_size,
        )
        return Place(positions, self._tables.slot_mapping(flat_slots, positions), attention)

    def tokens(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        return self._tables.tokens[self._flat(slots, starts, counts)]

    def _flat(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Slot and position of every token."""
        flat = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        positions = [start + j for start, count in zip(starts, counts, strict=True) for j in range(count)]
        return upload(flat, torch.int64, self.device), upload(positions, torch.int64, self.device)

    def _block_tables(self, slots: Tensor, longest: int) -> Tensor:
        return self._tables.block_tables[slots, : -(-longest // self._tables.block_size)]


class Weights:
    """See :class:`engine.contracts.drafter.DraftWeights`."""

    def __init__(self, model: ModelFacts, loading: DraftLoading, kv: KVCache, device: str) -> None:
        self._model = model
        self._loading = loading
        self._kv = kv
        self._device = device
        self._checkpoint: Checkpoint = open_checkpoint(model.path)
        self._quantizer = loading.quantizer(model)
        self._used: set[str] = set()
        self._table: Tensor | None = None
        self.names = frozenset(self._checkpoint.names)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        self._require({name})
        return self._loader(()).tensor(name, shape)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Callable[[Tensor], Tensor]:
        table = self.tensor(f"{name}.weight", (vocab_size, hidden_size))
        table = table.to(device=self._device, dtype=getattr(torch, self._loading.dtype))
        self._table = table
        return lambda tokens: torch.nn.functional.embedding(tokens, table)

    def norm(self, spec: NormSpec, size: int) -> Callable[[Tensor], Tensor]:
        self._require({f"{spec.name}.weight"})
        loader = self._loader(())
        return loader.lowering.norm(loader.norm(spec, size), spec.eps)

    def linear(self, spec: LinearSpec) -> Callable[[Tensor], Tensor]:
        self._require(linear_names(spec, self._quantizer)[0])
        loader = self._loader(())
        return loader.lowering.linear(loader.pack("draft", spec))

    def layers(self, ops: Sequence[Sequence[LayerOp]], first: int = 0) -> Layers:
        for op in (op for layer in ops for op in layer):
            norms = {f"{norm.name}.weight" for norm, _ in op_norms(op)}
            spec = linear_of(op)
            self._require(norms if spec is None else norms | linear_names(spec, self._quantizer)[0])
        loader = self._loader(ops)
        layers = [loader.layer(first + i, layer) for i, layer in enumerate(ops)]
        rotate = lower_rotations(loader.lowering, self._model.head_dim, self._loading.max_len)
        return Layers(layers, rotate, self._loading.attention, self._kv, can_replay(loader.lowering))

    def head(self, op: LMHead) -> Callable[[Tensor], Tensor]:
        needed = set() if op.tied else linear_names(op.head, self._quantizer)[0]
        self._require({f"{op.norm.name}.weight"} | needed)
        loader = self._loader(())
        packed = loader.pack("draft head", op.head, self._table if op.tied else None)
        return lower_head(loader.lowering, op, loader.norm(op.norm, op.head.in_features), packed).project

    def finish(self, ignored: Sequence[str] = ()) -> None:
        left = {name for name in self.names - self._used if not name.endswith(tuple(ignored) or ("\0",))}
        if left:
            raise CheckpointError(f"drafter.path={self._model.path}: tensors nobody asked for: {name_list(left)}")

    def _require(self, names: set[str]) -> None:
        missing = names - self.names
        if missing:
            raise CheckpointError(f"drafter.path={self._model.path}: tensors missing: {name_list(missing)}")

    def _loader(self, layers: Sequence[Sequence[LayerOp]]) -> Loader:
        loading = self._loading
        lowering = Lowering(
            device=self._device,
            dtype=getattr(torch, loading.dtype),
            attention=loading.attention,
            kv_format=loading.kv_format,
            parallelism=loading.parallelism,
            rope_kinds=rope_kinds(layers),
            kernels=loading.kernels,
        )
        return Loader(
            self._checkpoint, self._quantizer, lowering, first_layer=self._kv.num_target_layers, used=self._used
        )
