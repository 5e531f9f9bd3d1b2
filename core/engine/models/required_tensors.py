"""Which tensors an op reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.contracts.graph import Node
from engine.contracts.ops import (
    Attention,
    DeltaRule,
    Embed,
    Experts,
    HeadLinear,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    Op,
    Route,
    Router,
    ScaleBy,
    Share,
    SharedAttention,
    ShortConv,
    TorchFunction,
)


def linears_of(op: Op) -> tuple[LinearSpec, ...]:
    """The linear layers of one op, in the order in which they are packed."""
    if isinstance(op, Linear):
        return (op.spec,)
    if isinstance(op, Experts):
        return tuple(spec for pair in expert_linears(op) for spec in pair)
    return ()


def expert_linears(op: Experts) -> list[tuple[LinearSpec, LinearSpec]]:
    """Gate and up, and down, of each expert that is here."""
    numbers = range(op.num_experts) if op.held is None else op.held.numbers
    return [(_numbered(op.gate_up, i), _numbered(op.down, i)) for i in numbers]


def _numbered(spec: LinearSpec, number: int) -> LinearSpec:
    parts = tuple(replace(part, name=part.name.replace("{}", str(number))) for part in spec.parts)
    share = spec.share and replace(spec.share, whole=_numbered(spec.share.whole, number))
    return replace(spec, parts=parts, share=share)


def norm_tensors(op: Norm) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a norm reads."""
    shape = (op.by_head, op.size) if op.by_head else (op.size,)
    shape = shape if op.heads is None else (op.heads.whole, op.size)
    if op.name is not None:
        yield f"{op.name}.weight", shape
        if op.bias:
            yield f"{op.name}.bias", shape


def small_tensors_of(node: Node) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a node reads that is no linear layer."""
    if isinstance(node.op, Embed):
        yield f"{node.op.name}.weight", (node.op.vocab_size, node.op.size)
    elif isinstance(node.op, Norm):
        yield from norm_tensors(node.op)
    elif isinstance(node.op, Attention | SharedAttention) and node.sinks is not None:
        heads = node.op.num_heads if isinstance(node.op, Attention) else node.op.attention.num_heads
        yield node.sinks, (heads if node.heads is None else node.heads.whole,)
    elif isinstance(node.op, Router):
        yield from router_tensors(node.op)
    elif isinstance(node.op, Route):
        yield from ((name, (node.op.num_experts,)) for name in (node.op.correction, node.op.expert_scale) if name)
    elif isinstance(node.op, ScaleBy):
        yield node.op.name, (node.op.size,)
    elif isinstance(node.op, ShortConv):
        yield f"{node.op.name}.weight", (node.op.features, 1, node.op.kernel)
    elif isinstance(node.op, DeltaRule):
        yield from ((name, (node.op.num_heads,)) for name in (node.op.rate, node.op.bias))
    elif isinstance(node.op, TorchFunction):
        yield from node.op.tensors


def head_projection(op: HeadLinear) -> LinearSpec:
    """What all heads' rows are together: their weights are read as they are, whatever form they are stored in."""
    spec = LinearSpec((LinearPart(op.name, op.num_heads * op.rows),), op.features)
    if op.heads is None:
        return spec
    whole = LinearSpec((LinearPart(op.name, op.heads.whole * op.rows),), op.features)
    rows = op.heads.start * op.rows, op.heads.stop * op.rows
    return replace(spec, share=Share(whole, ((rows,),)))


def router_tensors(op: Router) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a router reads."""
    yield f"{op.name}.weight", (op.num_experts, op.in_features)
    if op.bias:
        yield f"{op.name}.bias", (op.num_experts,)
