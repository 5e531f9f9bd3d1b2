"""This rank's share of what a checkpoint stores, under tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.border.calls import broken, shown
from engine.contracts.graph import Graph, Node
from engine.contracts.ops import (
    Attention,
    DeltaRule,
    Experts,
    KVWrite,
    Linear,
    LinearSpec,
    Norm,
    Route,
    Router,
    ScaleBy,
    ShortConv,
    Slice,
    TorchFunction,
)
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import StoredTensor
from engine.models.required_tensors import linears

if TYPE_CHECKING:
    from torch import Tensor


def rank_of(parallelism: Parallelism, spec: LinearSpec) -> tuple[int, int]:
    """Which of how many cuts of a linear layer is this rank's."""
    match parallelism.shard(spec):
        case (int(index), int(count)) if 0 <= index < count and parallelism.world_size % count == 0:
            return index, count
        case found:
            among = f"of {parallelism.world_size} ranks (world_size)"
            raise broken(parallelism, "shard", f"returned {shown(found)}, expected (index, count) {among}")


def cut(tensor: Tensor, name: str, spec: LinearSpec, stored: StoredTensor, index: int, count: int) -> Tensor:
    """Cut ``index`` of ``count`` of a stored tensor. Raises ``ValueError`` if this axis cannot be cut so."""
    if count == 1 or spec.shard == "none" or tensor.dim() == 0:
        return tensor
    if stored.suffix == "bias" and spec.shard == "in":
        return tensor
    if spec.shard in stored.replicated:
        return tensor
    axis = stored.shard_axes.get(spec.shard)
    if axis is None:
        why = f": {stored.uncuttable}" if stored.uncuttable else ""
        raise ValueError(f"parallelism.tp={count}: {name} cannot be cut along its {spec.shard}put axis{why}")
    size = tensor.shape[axis]
    if size % (count * stored.quantum):
        raise ValueError(
            f"parallelism.tp={count}: {name} has {size} entries along its {spec.shard}put axis, which is not a "
            f"multiple of {count} x {stored.quantum}"
        )
    return tensor.narrow(axis, index * (size // count), size // count).contiguous()


def check_cuts(graph: Graph, tp: int) -> None:
    """Raise ``ValueError`` for a graph that ranks cannot compute together."""
    cuts = cut_values(graph)
    whole_norms = (
        f"norm {node.op.name}: over what ranks share out"
        for node in graph.nodes
        if isinstance(node.op, Norm) and node.inputs[0] in cuts and graph.sizes[node.inputs[0]] == node.op.size
    )
    by_head = (
        f"norm {node.op.name}: each head has a weight of its own"
        for node in graph.nodes
        if isinstance(node.op, Norm) and node.op.by_head and node.inputs[0] in cuts
    )
    latent = (
        "latent attention is not shared out over ranks"
        for node in graph.nodes
        if isinstance(node.op, Attention) and node.op.value_dim is not None
    )
    in_one = (
        f"linear {part.name}: one tensor of several projections is not shared out over ranks"
        for spec in linears(graph)
        for part in spec.parts
        if part.slices and spec.shard == "out"
    )
    if tp > 1 and (found := [*cut_problems(graph), *whole_norms, *by_head, *latent, *in_one]):
        raise ValueError(f"parallelism.tp={tp}: the model cannot be split: {found[0]}")


def cut_values(graph: Graph) -> frozenset[int]:
    """The values of which each rank has a part: what linear layers with ``shard="out"`` make, and what is computed of
    it feature by feature or head by head. Logits are gathered."""
    cuts: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.op, Linear):
            made = node.op.spec.shard == "out" and node.op.spec.kind != "head"
        else:
            made = not cuts.isdisjoint(node.inputs)
        if made:
            cuts.update(node.outputs)
    return frozenset(cuts)


def cut_problems(graph: Graph) -> Iterator[str]:
    """Where an op reads a part of a value that it needs all of, or the other way round."""
    cuts = cut_values(graph)
    for node in graph.nodes:
        found = {number in cuts for number in node.inputs}
        if isinstance(node.op, Linear):
            needs, expected = node.op.spec.shard == "in", 'shard="in" of what shard="out" made'
        elif isinstance(node.op, KVWrite) and len(node.inputs) == 1:
            needs, expected = False, "keys of all heads, which every rank has whole"
        elif isinstance(node.op, KVWrite | Attention):
            needs, expected = True, 'queries, keys and values that linear layers with shard="out" made'
        elif isinstance(node.op, Router | Route | Experts | ShortConv | DeltaRule | Slice) or _scales_features(node):
            needs, expected = False, "a value that every rank has whole"
        elif isinstance(node.op, TorchFunction) and not node.op.by_feature:
            needs, expected = False, "values that every rank has whole, or a function with by_feature"
        else:
            needs, expected = all(found), "inputs that are all whole or all shared out"
        if found != {needs}:
            yield f"{_title(node)}: expected {expected}"


def _scales_features(node: Node) -> bool:
    """By a number each, of which ranks would need a part."""
    return isinstance(node.op, ScaleBy) and node.op.size > 1


def _title(node: Node) -> str:
    if isinstance(node.op, TorchFunction):
        return f"torch function {node.op.function}"
    return f"linear {node.op.spec.parts[0].name}" if isinstance(node.op, Linear) else type(node.op).__name__


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Raise ``ValueError`` for heads that ranks cannot share out."""
    if num_heads % tp or num_kv_heads % tp:
        heads = f"{num_heads} heads and {num_kv_heads} KV heads"
        raise ValueError(f"parallelism.tp={tp}: does not divide the model's {heads}")


def local_attention(op: Attention, tp: int) -> Attention:
    """One rank's heads of it."""
    return replace(op, num_heads=op.num_heads // tp, num_kv_heads=op.num_kv_heads // tp)
