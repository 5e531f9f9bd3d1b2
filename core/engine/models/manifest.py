"""The manifest: every tensor that a model reads, from its graph, its quantizer and the names in its checkpoint.

Checks, the loader, memory estimates and drafters all read it: names, shapes, what is required, and what a rank cuts
out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeGuard

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import Embed, Experts, KVWrite, Linear, LinearPart, LinearSpec, Op, Range
from engine.contracts.quantizer import KVScaleNames, KVScaleReader, Quantizer, StoredTensor
from engine.models.fused_experts import fused_cuts, fused_layers, fused_stored, is_fused
from engine.models.sharding import cuts_of, has_bias
from engine.models.stored import is_stored, stored_of
from engine.plugin_guard.calls import contract_error, quote

Cuts = tuple[tuple[int, tuple[Range, ...]], ...]
"""See :meth:`engine.checkpoint.tensors.Checkpoint.read`."""


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...] | None
    """Of the whole tensor; ``None``: its quantizer judges."""
    required: bool = True
    cuts: Cuts = ()
    """What this rank reads of it."""
    stored: StoredTensor | None = None
    """What its quantizer says of it; ``None``: it is of no linear layer."""
    is_read: bool = True
    """Not a bias that another rank adds."""

    @property
    def suffix(self) -> str:
        """Of a linear layer's: what its quantizer calls it."""
        return self.name if self.stored is None else self.stored.suffix


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """What one op, or one linear layer, computes with on this rank."""

    kind: Literal["linear", "heads", "table", "small"]
    """``heads``: a projection of each head; ``table``: an embedding; ``small``: what is held in float32, such as norms
    and routers."""
    numbers: int
    """On this rank, for a linear layer without scales and biases."""
    parts: tuple[tuple[ManifestTensor, ...], ...]
    """By part of a linear layer."""
    spec: LinearSpec | None = None
    """Of what is a linear layer."""
    together: int = 0
    """Experts that the tensors hold together, of which ``spec`` is one; 0: they hold no more than one layer."""

    @property
    def tensors(self) -> Iterator[ManifestTensor]:
        return (tensor for part in self.parts for tensor in part)


class Manifest:
    """What a graph reads of a checkpoint with these ``names``. ``quantizer``: what reads it; ``None``: weights are
    stored as they are."""

    def __init__(self, quantizer: Quantizer | None = None, names: Container[str] = ()) -> None:
        self._quantizer = quantizer
        self._names = names

    def weights(self, graph: Graph) -> Iterator[ManifestEntry]:
        """In the order of loading. Ops may read different rows of one projection of heads, which counts once."""
        heads: set[LinearSpec | None] = set()
        for weight in (weight for node in graph.nodes for weight in self.of(node)):
            if weight.kind == "heads":
                if weight.spec in heads:
                    continue
                heads.add(weight.spec)
            yield weight

    def tensors(self, graph: Graph) -> Iterator[ManifestTensor]:
        """All but scales for the KV cache, which no graph needs."""
        return (tensor for weight in self.weights(graph) for tensor in weight.tensors)

    def layers(self, graph: Graph) -> list[LinearSpec]:
        """Linear layers that are stored one by one, projections of heads last. Asks the quantizer nothing of them."""
        return [*(spec for node in graph.nodes for spec in self._single(node.op)), *head_projections(graph)]

    def expected_names(self, graph: Graph) -> tuple[set[str], set[str]]:
        """The tensors that a checkpoint must have, and those that it may have."""
        tensors = list(self.tensors(graph))
        optional = {tensor.name for tensor in tensors if not tensor.required}
        for layer in graph.layers:
            for node in layer.nodes:
                if isinstance(node.op, KVWrite):
                    optional |= set(self.kv_scale_names(projection(layer, node.inputs[0])).all)
        return {tensor.name for tensor in tensors if tensor.required}, optional

    def of(self, node: Node) -> Iterator[ManifestEntry]:
        """What one op reads. A tied head reads nothing: its weight is the embedding's."""
        op = node.op
        if self.are_together(op):
            yield from self.experts(op)
        yield from map(self.linear, self._single(op))
        yield from (self.linear(spec, "heads") for spec in op.projections)
        small = as_they_are(node)
        if any(small.parts):
            yield small

    def _single(self, op: Op) -> Sequence[LinearSpec]:
        """Linear layers of an op that are stored one by one."""
        tied = isinstance(op, Linear) and op.tied
        return () if tied or self.are_together(op) else op.linears

    def linear(self, spec: LinearSpec, kind: Literal["linear", "heads"] = "linear") -> ManifestEntry:
        """``spec``: this rank's share."""
        parts = tuple(tuple(self._of_part(spec, number)) for number in range(len(spec.parts)))
        return ManifestEntry(kind, spec.num_weights, parts, spec)

    def _of_part(self, spec: LinearSpec, number: int) -> Iterator[ManifestTensor]:
        part = spec.whole.parts[number]
        for stored in stored_of(self._quantizer, spec.whole):
            if is_stored(stored, part):
                yield ManifestTensor(
                    f"{part.name}.{stored.suffix}",
                    _plain_shape(part, spec.whole, stored),
                    _is_required(part, stored),
                    cuts_of(stored, spec, number),
                    stored,
                    stored.suffix != "bias" or has_bias(spec),
                )

    def experts(self, op: Experts) -> Iterator[ManifestEntry]:
        """Gate and up, and down, of experts that are stored together."""
        for layer in fused_layers(op):
            tensors = tuple(self._of_all(op, layer))
            yield ManifestEntry("linear", op.num_experts * layer.num_weights, (tensors,), layer, op.num_experts)

    def are_together(self, op: Op) -> TypeGuard[Experts]:
        """Whether they are experts that the checkpoint stores in one tensor."""
        return isinstance(op, Experts) and is_fused(op, self._names, self._quantizer)

    def _of_all(self, op: Experts, layer: LinearSpec) -> Iterator[ManifestTensor]:
        assert op.fused is not None
        count = op.num_experts if op.held is None else op.held.whole
        for name, stored in fused_stored(layer, self._quantizer):
            shape = _plain_shape(layer.whole.parts[0], layer.whole, stored)
            turned = op.fused.transposed and stored.suffix == "weight"
            yield ManifestTensor(
                name,
                shape and (count, *(reversed(shape) if turned else shape)),
                _is_required(layer.parts[0], stored),
                tuple(fused_cuts(op, layer, stored)),
                stored,
                stored.suffix != "bias" or has_bias(layer),
            )

    def kv_scale_names(self, qkv: LinearSpec | None) -> KVScaleNames:
        """Where the checkpoint may have scales for a layer's cache; ``qkv``: what its keys come from."""
        if qkv is None or not isinstance(self._quantizer, KVScaleReader):
            return KVScaleNames()
        found = self._quantizer.kv_scale_names(qkv)
        if not isinstance(found, KVScaleNames):
            raise contract_error(self._quantizer, "kv_scale_names", f"returned {quote(found)}, expected KVScaleNames")
        return found


def as_they_are(node: Node) -> ManifestEntry:
    """Tensors of an op that are read as they are, of no linear layer."""
    own = node.op.own_rows
    cuts: Cuts = () if own is None else ((0, ((own.start, own.stop),)),)
    tensors = tuple(ManifestTensor(name, shape, cuts=cuts) for name, shape in node.op.reads(node))
    numbers = sum(prod(shape) for _, shape in node.op.reads(node))
    kind: Literal["table", "small"] = "table" if isinstance(node.op, Embed) else "small"
    return ManifestEntry(kind, numbers if own is None else numbers * own.size // own.whole, (tensors,))


def head_projections(graph: Graph) -> list[LinearSpec]:
    """Projections of each head by itself; several ops may read different rows of one."""
    return list(dict.fromkeys(spec for node in graph.nodes for spec in node.op.projections))


def unread_names(graph: Graph, names: Iterable[str]) -> set[str]:
    """Those that belong to parts of the checkpoint that the model does not read."""
    return {name for name in names if name.startswith(graph.ignored)}


def projection(block: Block, value: int) -> LinearSpec | None:
    """The linear layer in this block that a value comes from, through whatever lies between."""
    for node in reversed(block.nodes):
        if value in node.outputs:
            if isinstance(node.op, Linear):
                return node.op.spec
            return projection(block, node.inputs[node.outputs.index(value)])
    return None


def _plain_shape(part: LinearPart, spec: LinearSpec, stored: StoredTensor) -> tuple[int, ...] | None:
    """The shape an unquantized tensor must have; quantizers judge their own."""
    if stored.suffix == "bias":
        return (part.out_features,)
    is_plain = stored.suffix == "weight" and all(count == 1 for count in stored.per_entry.values())
    return (part.out_features, spec.in_features) if is_plain else None


def _is_required(part: LinearPart, stored: StoredTensor) -> bool:
    return part.bias if stored.suffix == "bias" else not stored.optional
