"""Where scales of a layer's inputs go: into the norm, or the output rows, that produce these inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from tools.quantize.calibration import Linear
from tools.quantize.scaling import Share
from torch import Tensor

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import Attention, Gate, Gated, KVWrite, LinearSpec, Norm, Scale
from engine.contracts.ops import Linear as LinearOp

Fold = Callable[[Tensor], Tensor]
"""Divides what produces the inputs by scales ``[in]``; returns the scales that this really came to."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer whose inputs can be scaled without computing anything else at run time.

    ``share``: see :data:`tools.quantize.scaling.Share`.
    """

    linear: Linear
    share: Share
    fold: Fold


def sites(graph: Graph, block: Block, linears: Mapping[str, Linear], norms: dict[str, Tensor]) -> dict[int, Site]:
    """The linear layers of a layer whose inputs can be scaled by what produces them, by the index of their node.

    That is a norm over all features; or the part of a linear layer that makes the values of attention, or what an
    activated gate is multiplied with: both are only weighed and multiplied on the way. Nobody else may read what is
    scaled. ``linears`` by the name of their first part, ``norms`` by checkpoint name: folding changes both.
    """
    found: dict[int, Site] = {}
    for index, node in enumerate(block.nodes):
        if isinstance(node.op, LinearOp) and not node.op.tied:
            site = _site(_Block(graph, block, linears), node, linears[_first(node.op.spec)], norms)
            if site is not None:
                found[index] = site
    return found


def readers(graph: Graph, value: int) -> list[Node]:
    """The nodes that read a value, one for each time that it is read."""
    return [node for node in graph.nodes for number in node.inputs if number == value]


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer of the running model."""

    graph: Graph
    block: Block
    linears: Mapping[str, Linear]

    def source(self, value: int) -> tuple[Node, int] | None:
        """The node that a value comes from, and what that node made: before anything that multiplies each feature by
        itself. ``None`` if it is not of this layer, or if something on the way is read more than once."""
        if len(readers(self.graph, value)) != 1:
            return None
        for node in self.block.nodes:
            if value in node.outputs:
                return self.source(node.inputs[0]) if isinstance(node.op, Scale | Gate) else (node, value)
        return None

    def rows(self, value: int) -> tuple[Linear, slice] | None:
        """The linear layer that a value comes from, and which of its output rows."""
        match self.source(value):
            case (Node(LinearOp(spec, tied=False)) as node, made):
                which = node.outputs.index(made)
                end = list(accumulate(spec.outputs))[which]
                return self.linears[_first(spec)], slice(end - spec.outputs[which], end)
        return None

    def attended(self, node: Node) -> int | None:
        """The values that attention weighs, if no other attention reads them from the cache."""
        same = [other for other in self.graph.nodes if other.cache == node.cache]
        if len(same) != 2:
            return None
        return next((other.inputs[1] for other in self.block.nodes if other in same and _writes(other)), None)


def _site(layer: _Block, node: Node, linear: Linear, norms: dict[str, Tensor]) -> Site | None:
    made: tuple[Linear, slice] | None = None
    match layer.source(node.inputs[0]):
        case (Node(Norm() as op), _) if _is_foldable(op, layer.graph, linear):
            return Site(linear, _alone, _into_norm(linear, op, norms))
        case (Node(Attention(value_dim=None) as op) as before, _):
            values, heads, size = layer.attended(before), op.num_kv_heads, op.head_dim
            made = None if values is None else layer.rows(values)
            return None if made is None else Site(linear, _by_head(heads, size), _into_rows(*made, heads, size))
        case (Node(Gated(limit=None, offset=0.0)) as before, _):
            made = layer.rows(before.inputs[1])
            return None if made is None else Site(linear, _alone, _into_rows(*made, 1, linear.spec.in_features))
    return None


def _is_foldable(op: Norm, graph: Graph, linear: Linear) -> bool:
    """Whether a norm's weight is all that its output is multiplied by, one for each feature, and its own."""
    same = [node for node in graph.nodes if isinstance(node.op, Norm) and node.op.name == op.name]
    is_one = op.name is not None and not op.bias and not op.by_head and op.size == linear.spec.in_features
    return is_one and len(same) == 1


def _first(spec: LinearSpec) -> str:
    return spec.parts[0].name


def _writes(node: Node) -> bool:
    return isinstance(node.op, KVWrite)


def _alone(values: Tensor) -> Tensor:
    return values


def _by_head(num_kv_heads: int, head_dim: int) -> Share:
    """Query heads that attend to the same value head share its scales. ``[heads * head_dim]`` both ways."""

    def share(values: Tensor) -> Tensor:
        by_head = values.view(num_kv_heads, -1, head_dim)
        return by_head.amax(dim=1, keepdim=True).expand_as(by_head).flatten()

    return share


def _into_norm(linear: Linear, norm: Norm, norms: dict[str, Tensor]) -> Fold:
    """Into the weight of a norm. What its dtype rounds away, the linear layer makes up for."""
    name, offset = f"{norm.name}.weight", norm.offset

    def fold(scales: Tensor) -> Tensor:
        stored = norms[name].to(scales.device)
        old = stored.float() + offset
        new = (old / scales - offset).to(stored.dtype)
        became = new.float() + offset
        usable = (old != 0) & (became != 0)
        norms[name] = torch.where(usable, new, stored).cpu()
        real = torch.where(usable, old / became, 1.0)
        linear.divide = real
        return real

    return fold


def _into_rows(source: Linear, rows: slice, heads: int, head_dim: int) -> Fold:
    """Into some outputs of another linear layer: values of q, k, v and up of gate, up. They are ``heads * head_dim``,
    and each head may serve several of the inputs (see :func:`_by_head`)."""

    def fold(scales: Tensor) -> Tensor:
        by_row = scales.view(heads, -1, head_dim)[:, 0].flatten()
        source.weight = source.weight.clone()
        source.weight[rows] /= by_row[:, None]
        if source.bias is not None:
            source.bias = source.bias.clone()
            source.bias[rows] /= by_row
        return scales

    return fold
