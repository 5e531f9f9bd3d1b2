"""The manifest: every tensor that a model reads, from its graph, its quantizer and the names in its checkpoint.

Checks, the loader, memory estimates and drafters all read it: names, shapes, what is required, and what a rank cuts
out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import (
    Cut,
    Embed,
    Experts,
    HeadLinear,
    KVWrite,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    Range,
)
from engine.contracts.quantizer import KVScaleNames, KVScaleReader, Quantizer, StoredTensor
from engine.models.fused_experts import fused_cuts, fused_layers, fused_stored, is_fused
from engine.models.required_tensors import expert_linears, head_projection, linears_of, small_tensors_of
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

    kind: Literal["linear", "expert", "heads", "table", "small"]
    """``expert``: a linear layer of an expert; ``heads``: a projection of each head; ``table``: an embedding;
    ``small``: what is held in float32, such as norms and routers."""
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
        heads: set[str] = set()
        for node in graph.nodes:
            if isinstance(node.op, HeadLinear):
                if node.op.name in heads:
                    continue
                heads.add(node.op.name)
            yield from self.of(node)

    def tensors(self, graph: Graph) -> Iterator[ManifestTensor]:
        """All but scales for the KV cache, which no graph needs."""
        return (tensor for weight in self.weights(graph) for tensor in weight.tensors)

    def layers(self, graph: Graph) -> list[LinearSpec]:
        """Linear layers that are stored one by one, projections of heads last. Asks the quantizer nothing of them."""
        found: list[LinearSpec] = []
        for node in graph.nodes:
            tied = isinstance(node.op, Linear) and node.op.tied
            if not tied and not (isinstance(node.op, Experts) and self.are_together(node.op)):
                found += linears_of(node.op)
        ops = (node.op for node in graph.nodes if isinstance(node.op, HeadLinear))
        return found + list(dict.fromkeys(head_projection(op) for op in ops))

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
        if isinstance(op, Linear):
            if not op.tied:
                yield self.linear(op.spec)
        elif isinstance(op, Experts):
            yield from self.experts(op)
        elif isinstance(op, HeadLinear):
            yield self.linear(head_projection(op), "heads")
        elif isinstance(op, Embed):
            yield table(op)
        else:
            yield small(node)

    def linear(self, spec: LinearSpec, kind: Literal["linear", "expert", "heads"] = "linear") -> ManifestEntry:
        """``spec``: this rank's share."""
        parts = tuple(tuple(self._of_part(spec, number)) for number in range(len(spec.parts)))
        return ManifestEntry(kind, spec.out_features * spec.in_features, parts, spec)

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
        """Gate and up, and down: of one expert after another, or of all that are stored together."""
        if not self.are_together(op):
            for up, down in expert_linears(op):
                yield self.linear(up, "expert")
                yield self.linear(down, "expert")
            return
        for layer in fused_layers(op):
            tensors = tuple(self._of_all(op, layer))
            yield ManifestEntry(
                "expert", op.num_experts * layer.out_features * layer.in_features, (tensors,), layer, op.num_experts
            )

    def are_together(self, op: Experts) -> bool:
        """Whether the checkpoint stores experts in one tensor."""
        return is_fused(op, self._names, self._quantizer)

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


def table(op: Embed) -> ManifestEntry:
    """An embedding."""
    rows = op.vocab_size if op.rows is None else op.rows.size
    tensor = ManifestTensor(f"{op.name}.weight", (op.vocab_size, op.size), cuts=_rows(op.rows))
    return ManifestEntry("table", rows * op.size, ((tensor,),))


def small(node: Node) -> ManifestEntry:
    """Tensors that are held in float32."""
    own = node.op.heads if isinstance(node.op, Norm) else None
    tensors = tuple(ManifestTensor(name, shape, cuts=_rows(own)) for name, shape in small_tensors_of(node))
    numbers = sum(prod(tensor.shape) for tensor in tensors if tensor.shape is not None)
    return ManifestEntry("small", numbers if own is None else numbers * own.size // own.whole, (tensors,))


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


def _rows(cut: Cut | None) -> Cuts:
    """Of a tensor whose first axis ranks share out; ``None``: they do not."""
    return () if cut is None else ((0, ((cut.start, cut.stop),)),)
