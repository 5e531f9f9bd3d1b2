"""How many bytes the weights will take, from the model's ops and the checkpoint's headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import Checkpoint, TensorEntry
from engine.contracts.graph import Graph
from engine.contracts.ops import Linear, LinearSpec
from engine.contracts.ops.work import Widths
from engine.contracts.quantizer import Quantizer
from engine.kernels.backends import fused_graph
from engine.kernels.packer import format_of
from engine.kernels.packing import Target, packed_bytes
from engine.kernels.settings import Kernel
from engine.models.checkpoint_checks import check_readable
from engine.models.fuse import Fused
from engine.models.manifest import Manifest, ManifestEntry, ManifestTensor
from engine.models.work import held_bytes
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
    """Of the manifest, in the order of loading; reads no tensor. ``bound``: the plugins of ``plan``; ``own``: what of
    the model this rank computes, ``None``: all.

    A tensor that is missing from the checkpoint counts as empty: saying so is the loader's job. Raises
    :class:`engine.checkpoint.tensors.CheckpointError` where headers show that the quantizer cannot read them.
    """
    graph = bound.graph
    check_readable(checkpoint, graph, bound.quantizer, plan.model.path)
    own = graph if own is None else own
    lowering = lowering_of(plan, bound, own)
    sizer = _Sizer(bound.quantizer, checkpoint, Target.of(lowering))
    held = peak = 0
    blocks = fused_graph(own, lowering)
    for kept, passing in sizer.steps(blocks):
        held += kept
        peak = max(peak, held + passing)
    return WeightSizes(held, peak - held)


def quantized_bytes(graph: Graph, dtype: torch.dtype, bits: int) -> int:
    """About what all weights take, with linear layers in ``bits`` bits, a head in 8 and embeddings and projections of
    heads in ``dtype``. A tied head is packed beside its embedding."""
    low, head = bits + SCALE_BITS, 8 + SCALE_BITS
    held = held_bytes(graph, Widths(low, low, head, values=8.0 * dtype.itemsize))
    return held + (int(graph.lm_head.spec.num_weights * head / 8) if graph.lm_head.tied else 0)


class _Sizer:
    def __init__(self, quantizer: Quantizer, checkpoint: Checkpoint, target: Target) -> None:
        self._quantizer, self._checkpoint = quantizer, checkpoint
        self._target, self._dtype = target, target.dtype
        self._names = checkpoint.names
        self._manifest = Manifest(quantizer, self._names)

    def steps(self, blocks: Iterable[Sequence[Fused[Kernel]]]) -> Iterator[tuple[int, int]]:
        """In the order of loading: bytes that stay, and bytes that are needed beside them for a moment."""
        heads: set[LinearSpec | None] = set()
        for fused in chain.from_iterable(blocks):
            packed = iter(fused.linears)
            for node in fused.nodes:
                if isinstance(node.op, Linear):
                    spec = next(packed)
                    yield self._linear(spec, () if node.op.tied else self._manifest.linear(spec).tensors, node.op.tied)
                elif self._manifest.are_together(node.op):
                    yield from self._together([*self._manifest.experts(node.op)])
                else:  # ops may read different rows of one projection
                    found = self._manifest.of(node)
                    yield from (self._weight(weight) for weight in found if weight.spec not in heads)
                heads.update(node.op.projections)

    def _weight(self, weight: ManifestEntry) -> tuple[int, int]:
        if weight.kind == "small":
            return weight.numbers * torch.float32.itemsize, 0
        if weight.kind == "heads":
            return weight.numbers * self._dtype.itemsize, 0
        if weight.kind == "table":
            (tensor,) = weight.tensors
            passing = sum(size for entry, size in self._stored((tensor,)) if entry.dtype != self._dtype)
            return weight.numbers * self._dtype.itemsize, self._on_host(passing)
        assert weight.spec is not None
        return self._linear(weight.spec, weight.tensors)

    def _together(self, weights: Sequence[ManifestEntry]) -> Iterator[tuple[int, int]]:
        """Experts that are stored together are read together, and put in order at worst."""
        stored = sum(size for weight in weights for _, size in self._stored(weight.tensors))
        for weight in weights:
            assert weight.spec is not None
            held, passing = self._linear(weight.spec, ())
            yield weight.together * held, self._on_host(2 * stored) + passing

    def _linear(self, spec: LinearSpec, tensors: Iterable[ManifestTensor], tied: bool = False) -> tuple[int, int]:
        """``tensors``: what is read for it."""
        stored = sum(size for _, size in self._stored(tensors))
        joined = stored if len(spec.parts) > 1 else 0
        # Packing rearranges the weight in at most one further copy, in two where gates and ups take turns.
        copies = 2 if spec.kind == "gate_up" else 1
        copy = copies * spec.out_features * spec.in_features * self._dtype.itemsize
        held = packed_bytes(spec, format_of(self._quantizer, spec), self._target, tied)
        return held, self._on_host(stored + joined + copy)

    def _stored(self, tensors: Iterable[ManifestTensor]) -> Iterator[tuple[TensorEntry, int]]:
        """Of those that the checkpoint has, how many bytes this rank reads of each."""
        for tensor in tensors:
            if tensor.is_read and tensor.name in self._names:
                entry = self._checkpoint.entry(tensor.name)
                yield entry, _taken(entry, tensor)

    def _on_host(self, num_bytes: int) -> int:
        """Stored tensors pass through host memory: on another device they take nothing."""
        return num_bytes if self._target.device == "cpu" else 0


def _taken(entry: TensorEntry, tensor: ManifestTensor) -> int:
    """Bytes that are read of a tensor; of one that is not as large as it should be, none more than it has."""
    taken = entry.num_bytes
    for axis, ranges in tensor.cuts:
        if axis < len(entry.shape) and entry.shape[axis]:
            taken = taken * sum(stop - start for start, stop in ranges) // entry.shape[axis]
    return taken
