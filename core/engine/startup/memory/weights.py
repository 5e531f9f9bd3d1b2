"""How many bytes the weights will take, from the model's ops and the checkpoint's headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import Checkpoint, Cut, TensorEntry
from engine.contracts.graph import Graph, Node
from engine.contracts.ops import Embed, Experts, HeadLinear, Linear, LinearSpec, Norm
from engine.contracts.quantizer import Quantizer, SizedQuantizer
from engine.kernels.backends import fused_graph
from engine.kernels.settings import Kernel
from engine.models.fuse import Fused
from engine.models.fused_experts import fused_cuts, fused_layers, fused_stored, is_fused
from engine.models.required_tensors import (
    check_readable,
    head_projections,
    linears,
)
from engine.models.sharding import cuts_of, has_bias
from engine.models.stored import is_stored, stored_of
from engine.plugin_guard.calls import contract_error, quote
from engine.startup.lowering import lowering_of

SCALE_BITS = 0.5
"""Of a weight in few bits, for its share of a scale: one float32 for 64 weights."""


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes on the device."""

    held: int
    """Once everything is loaded."""
    loading: int
    """On top of ``held``, at the worst moment of loading: tensors as stored, beside their packed form."""


def weight_sizes(plan: EnginePlan, bound: BoundEngine, checkpoint: Checkpoint, own: Graph | None = None) -> WeightSizes:
    """Follows the loader step by step; reads no tensor. ``bound``: the plugins of ``plan``; ``own``: what of the model
    this rank computes, ``None``: all.

    A tensor that is missing from the checkpoint counts as empty: saying so is the loader's job. Raises
    :class:`engine.checkpoint.tensors.CheckpointError` where headers show that the quantizer cannot read them.
    """
    graph = bound.graph
    check_readable(checkpoint, graph, bound.quantizer, plan.model.path)
    own = graph if own is None else own
    lowering = lowering_of(plan, bound, own)
    sizer = _Sizer(bound.quantizer, checkpoint, getattr(torch, plan.dtype), plan.device.kind)
    held = peak = 0
    blocks = fused_graph(own, lowering)
    for kept, passing in sizer.steps(blocks):
        held += kept
        peak = max(peak, held + passing)
    return WeightSizes(held, peak - held)


def quantized_bytes(graph: Graph, dtype: torch.dtype, bits: int) -> int:
    """About what all weights take, rather too much, with linear layers in ``bits`` bits, a head in 8 and embeddings and
    projections of heads in ``dtype``."""
    body = sum(spec.in_features * spec.out_features for spec in linears(graph) if spec.kind != "head")
    head = graph.lm_head.spec
    in_bits = body * (bits + SCALE_BITS) + head.in_features * head.out_features * (8 + SCALE_BITS)
    tables = sum(node.op.vocab_size * node.op.size for node in graph.nodes if isinstance(node.op, Embed))
    of_heads = sum(spec.in_features * spec.out_features for spec in head_projections(graph))
    return (tables + of_heads) * dtype.itemsize + int(in_bits / 8)


@dataclass(frozen=True, slots=True)
class _Sizer:
    _quantizer: Quantizer
    _checkpoint: Checkpoint
    _dtype: torch.dtype
    _device: str

    def steps(self, blocks: Iterable[Sequence[Fused[Kernel]]]) -> Iterator[tuple[int, int]]:
        """In the order of loading: bytes that stay, and bytes that are needed beside them for a moment."""
        by_heads: set[str] = set()
        for fused in chain.from_iterable(blocks):
            linear = iter(fused.linears)
            for node in fused.nodes:
                if isinstance(node.op, Embed):
                    yield from self.table(node.op)
                elif isinstance(node.op, Linear):
                    yield self._linear(next(linear), tied=node.op.tied)
                elif isinstance(node.op, Experts):
                    yield from self._experts(node.op)
                elif isinstance(node.op, HeadLinear):
                    if node.op.name not in by_heads:  # ops may read different rows of one tensor
                        yield node.op.num_heads * node.op.rows * node.op.features * self._dtype.itemsize, 0
                    by_heads.add(node.op.name)
                else:
                    yield sum(_numbers(node, shape) for _, shape in node.op.reads(node)) * torch.float32.itemsize, 0

    def table(self, op: Embed) -> Iterator[tuple[int, int]]:
        rows = op.vocab_size if op.rows is None else op.rows.size
        passing = self._on_host(self._converted(f"{op.name}.weight")) * rows // op.vocab_size
        yield rows * op.size * self._dtype.itemsize, passing

    def _experts(self, op: Experts) -> Iterator[tuple[int, int]]:
        """Those that are stored together are read together, and put in order at worst."""
        if not is_fused(op, self._checkpoint.names, self._quantizer):
            for up, down in op.each:
                yield self._linear(up)
                yield self._linear(down)
            return
        layers = fused_layers(op)
        stored = sum(
            _of(self._checkpoint.entry(name), fused_cuts(op, layer, one))
            for layer in layers
            for name, one in fused_stored(layer, self._quantizer)
            if name in self._checkpoint.names
        )
        for layer in layers:
            held, passing = self._linear(layer)
            yield op.num_experts * held, self._on_host(2 * stored) + passing

    def _linear(self, spec: LinearSpec, tied: bool = False) -> tuple[int, int]:
        packed = self._packed(spec, tied)
        stored = 0 if tied else sum(size for _, size in self._stored(spec))
        joined = stored if len(spec.parts) > 1 else 0
        # Packing rearranges the weight in at most one further copy, in two where gates and ups take turns.
        copies = 2 if spec.kind == "gate_up" else 1
        copy = copies * spec.out_features * spec.in_features * self._dtype.itemsize
        return packed, self._on_host(stored + joined + copy)

    def _packed(self, spec: LinearSpec, tied: bool) -> int:
        if isinstance(self._quantizer, SizedQuantizer):
            size = self._quantizer.packed_bytes(spec, self._dtype, self._device, tied)
            if type(size) is not int or size < 0:
                raise contract_error(
                    self._quantizer, "packed_bytes", f"returned {quote(size)}, expected a number of bytes"
                )
            return size
        if tied:
            return spec.out_features * spec.in_features * self._dtype.itemsize
        return self._as_stored(spec)

    def _as_stored(self, spec: LinearSpec) -> int:
        """For a quantizer that does not say: packed tensors as they are, float tensors in the compute dtype."""
        return sum(self._in_compute_dtype(entry, size) for entry, size in self._stored(spec))

    def _in_compute_dtype(self, entry: TensorEntry, size: int) -> int:
        if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
            return size
        return size // entry.dtype.itemsize * self._dtype.itemsize

    def _stored(self, spec: LinearSpec) -> Iterator[tuple[TensorEntry, int]]:
        """Tensors of a layer, and how many bytes of each this rank reads."""
        for stored, (number, part) in product(stored_of(self._quantizer, spec.whole), enumerate(spec.whole.parts)):
            name = f"{part.name}.{stored.suffix}"
            if not is_stored(stored, part) or name not in self._checkpoint.names:
                continue
            if stored.suffix != "bias" or has_bias(spec):
                entry = self._checkpoint.entry(name)
                yield entry, _of(entry, cuts_of(stored, spec, number))

    def _converted(self, name: str) -> int:
        """Bytes of a stored tensor that is not used as it is."""
        if name not in self._checkpoint.names:
            return 0
        entry = self._checkpoint.entry(name)
        return 0 if entry.dtype == self._dtype else entry.num_bytes

    def _on_host(self, num_bytes: int) -> int:
        """Stored tensors pass through host memory: on another device they take nothing."""
        return num_bytes if self._device == "cpu" else 0


def _numbers(node: Node, shape: tuple[int, ...]) -> int:
    """What this rank has of a tensor that is held as it is."""
    own = node.op.heads if isinstance(node.op, Norm) else None
    return prod(shape) if own is None else prod(shape) * own.size // own.whole


def _of(entry: TensorEntry, cuts: Sequence[Cut]) -> int:
    """Bytes that are read of a tensor; of one that is not as large as it should be, none more than it has."""
    taken = entry.num_bytes
    for axis, ranges in cuts:
        if axis < len(entry.shape) and entry.shape[axis]:
            taken = taken * sum(stop - start for start, stop in ranges) // entry.shape[axis]
    return taken
