"""Models of random weights that are in no file, and decode steps of them: for numbers of launches and for speed, which
depend on sizes and not on what weights are."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.assembly.model_config import read_config
from engine.checkpoint.tensors import Checkpoint, Cut, TensorEntry
from engine.contracts.architecture import Architecture
from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.graph import Graph, KVSpec
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import Experts
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import Quantizer
from engine.kernels.backends import rotations
from engine.kernels.context import ForwardBatch, StepContext, prepared_of
from engine.kernels.linear import PackedLinear
from engine.kernels.loading import Loader
from engine.kernels.model import LoweredModel
from engine.kernels.settings import Kernels, Lowering
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.models.manifest import Manifest
from engine.models.record import facts, recorded
from engine.testing.context import build_context

BLOCK = 16
"""Tokens."""


class RandomCheckpoint(Checkpoint):
    """What ``graph`` reads, experts one by one. A tensor is drawn when it is read, on ``device``, and is the same
    whenever that is."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: str) -> None:
        tensors = Manifest().tensors(graph)
        shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.shape is not None}
        here = Path(__file__)  # where tensors come from is asked for, and must exist
        super().__init__(
            {name: TensorEntry(here, dtype, shape, 0, prod(shape) * dtype.itemsize) for name, shape in shapes.items()}
        )
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device)

    def read(self, name: str, cuts: Sequence[Cut] = ()) -> Tensor:
        """Weights of norms are ones, all others normal: activations keep their size through the layers."""
        assert not cuts, "a random model is of one rank"
        shape = self.entry(name).shape
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = self._generator.manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return drawn.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)


class CountingLoader(Loader):
    """Also knows how many bytes of experts a token does not read."""

    idle_bytes = 0

    def stacked_experts(self, op: Experts) -> tuple[PackedLinear, PackedLinear]:
        found = super().stacked_experts(op)
        held = sum(packed.num_bytes for packed in found)
        self.idle_bytes += held - held * op.top_k // op.num_experts
        return found


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model, and a cache with as many tokens of each of ``rows`` sequences as a step is to see."""

    facts: ModelFacts
    model: LoweredModel
    kv: KVCache
    batch: ForwardBatch
    prepared: tuple[Any, ...]
    weight_bytes: int
    """Of what a decode step of one sequence reads: all but the embedding, and experts that are not chosen."""
    kv_bytes: int
    """Keys and values that a decode step reads."""

    def step(self) -> Tensor:
        """A decode step: the next token of each sequence, int64 ``[rows]``."""
        hidden, _ = self.model.run(self.batch, self.kv, self.prepared)
        return self.model.greedy(hidden)[1]

    def layer(self, index: int) -> Callable[[], None]:
        """One layer of a decode step, ready to run."""
        batch, layer = self.batch, self.model.layers[index]
        rotations = self.model.rotate(batch.positions)
        context = StepContext(rotations, batch.slot_mappings, self.prepared, self.kv, batch.positions, batch.attention)
        assert layer.residual is not None
        residual, hidden = layer.residual, self.model.embed(batch.token_ids)

        def run() -> None:
            with torch.inference_mode():
                layer.run({residual: hidden.clone()}, context)

        return run


def random_model(
    architecture: Architecture,
    config: Mapping[str, Any],
    quantizer: Callable[[BuildContext], Quantizer],
    attention: Callable[[BuildContext], AttentionKernel],
    kv_format: KVFormat,
    dtype: str,
    device: str,
    *,
    kernels: Kernels = "triton",
    rows: int = 1,
    tokens: int = 64,
) -> RandomModel:
    """``config``: ``config.json``; each of ``rows`` sequences has ``tokens`` tokens, the one of the step included."""
    described = read_config(config, {}, "/nowhere", "random")
    known, graph = facts(architecture, described), recorded(architecture, described)
    place = DeviceFacts("cuda" if device.startswith("cuda") else "cpu")
    context = replace(build_context(block_size=BLOCK), model=known, device=place, dtype=dtype)
    compute, kernel = getattr(torch, dtype), attention(context)
    lowering = Lowering(device, compute, kernel, kv_format, rotations(graph), kernels)
    loader = CountingLoader(RandomCheckpoint(graph, compute, device), quantizer(context), lowering)
    with torch.inference_mode():
        model = loader.load(graph, tokens)
    blocks = rows * -(-tokens // BLOCK)
    groups = cache_groups(graph.caches)
    kv = KVCache(groups, kv_format, [1 + blocks] * groups.num_groups, BLOCK, dtype, device)
    _fill(kv, compute, device)
    batch = _decode_batch(rows, tokens, groups.num_groups, device)
    table = loader.table[1] if loader.table is not None and not known.tie_embeddings else None
    weight_bytes = model.weights_bytes - loader.idle_bytes - (0 if table is None else table.nbytes)
    kv_bytes = rows * sum(
        (1 if spec.value_dim else 2) * spec.num_kv_heads * spec.head_dim * min(tokens, spec.reach.tokens or tokens)
        for spec in graph.caches
        if isinstance(spec, KVSpec)
    )
    return RandomModel(
        known, model, kv, batch, prepared_of(kernel, batch.attention), weight_bytes, kv_bytes * kv.layers[0].k.itemsize
    )


def _fill(kv: KVCache, dtype: torch.dtype, device: str) -> None:
    """Random keys and values everywhere; states of recurrent layers are zeros."""
    generator = torch.Generator(device).manual_seed(1)
    for cache, spec in enumerate(kv.groups.caches):
        if not isinstance(spec, KVSpec):
            continue
        slots = torch.arange(kv.num_blocks[0] * BLOCK, device=device)
        shape = (2, len(slots), spec.num_kv_heads, spec.head_dim)
        k, v = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        kv.write(cache, slots, k, v if spec.value_dim is None else None)


def _decode_batch(rows: int, tokens: int, num_groups: int, device: str) -> ForwardBatch:
    """The last token of each sequence; blocks lie in order, those of the first sequence first."""

    def of(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    count, ones = -(-tokens // BLOCK), (1,) * rows
    tables = 1 + torch.arange(rows * count, dtype=torch.int32, device=device).view(rows, count)
    last = tables[:, (tokens - 1) // BLOCK].long() * BLOCK + (tokens - 1) % BLOCK
    starts, lengths = of(range(rows + 1), torch.int32), of([tokens] * rows, torch.int32)
    attention = AttentionBatch(ones, (tokens,) * rows, tables, starts, lengths, BLOCK)
    positions = of([tokens - 1] * rows)
    return ForwardBatch(
        of(range(5, 5 + rows)), positions, (last,) * num_groups, (attention,) * num_groups, of(range(rows))
    )
