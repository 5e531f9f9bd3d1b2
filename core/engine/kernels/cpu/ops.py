"""Each op by itself on the C++ kernels of the core: of tensors, or of values (:mod:`engine.kernels.cpu.program`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contracts.graph import Node
from engine.contracts.ops import (
    Activation,
    Add,
    CountExperts,
    Embed,
    Gate,
    Gated,
    HeadJoin,
    HeadLinear,
    HeadSlice,
    KVWrite,
    Linear,
    Norm,
    Op,
    PositionScale,
    Rope,
    Scale,
    ScaleBy,
    Slice,
    SoftCap,
)
from engine.kernels.context import StepContext
from engine.kernels.cpu.elementwise import Combine, head_norms, rotated_heads, scaled_by_position, write_kv
from engine.kernels.cpu.expert_ops import count_experts
from engine.kernels.cpu.head_ops import joined_heads, multiplied_heads, sliced_heads
from engine.kernels.cpu.program import NotNative, Value, empty, run
from engine.kernels.linear import NativeLinear, PackedLinear
from engine.kernels.settings import MOST_TOKENS, Kernel, Lowered, Lowering, Weights, cache_of
from engine.kernels.torch.ops import linear_call, lower_embed, scale_factor
from engine.models.fuse import Fused, Match

LowerOp = Callable[[Lowering, Any, Fused[Kernel], Weights], Lowered]


def single_kernels() -> tuple[Kernel, ...]:
    """A kernel for each op that C++ has."""
    return tuple(_single(kind, lower) for kind, lower in _LOWER.items())


def _single(kind: type[Op], lower: LowerOp) -> Kernel:
    def match(nodes: Sequence[Node]) -> Match | None:
        op = nodes[0].op
        if not isinstance(op, kind) or not _is_known(nodes[0]):
            return None
        return Match(op, 1, op.linears)

    suits = (lambda lowering, op: lowering.stores_kv_as_is) if kind is KVWrite else None
    return Kernel(match, lambda lowering, fused, weights: lower(lowering, fused.what, fused, weights), suits)


def _is_known(node: Node) -> bool:
    """Whether C++ has this form of an op."""
    return not isinstance(node.op, Gated) or node.op.is_plain


def native_linear(packed: PackedLinear) -> Callable[[Tensor], Tensor]:
    """``apply`` of tensors, the native call of values."""

    def linear(x: Tensor) -> Tensor:
        if not isinstance(x, Value):
            return packed.apply(x)
        y = empty(x, "product", (x.shape[0], packed.out_features))
        run(native_of(packed), x, y)
        return y

    return linear


def native_of(packed: PackedLinear) -> NativeLinear:
    """Raises :class:`NotNative`."""
    if packed.native is None:
        raise NotNative(obstacle(packed) or "")
    return packed.native


def obstacle(packed: PackedLinear) -> str | None:
    """Why a program cannot call this layer."""
    return None if packed.native is not None else f"its linear layers ({packed.label}) have no native calls"


def _embed(lowering: Lowering, op: Embed, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return lower_embed(op, weights, not_native=None)


def _linear(lowering: Lowering, op: Linear, fused: Fused[Kernel], weights: Weights) -> Lowered:
    packed = weights.linear(op.spec, tied=op.tied)
    return Lowered(linear_call(op.spec, native_linear(packed)), packed.label, obstacle(packed))


def _norm(lowering: Lowering, op: Norm, fused: Fused[Kernel], weights: Weights) -> Lowered:
    weight, bias = weights.norm(op), weights.norm_bias(op)
    norm = by_width(lambda width: head_norms(op, width, weight, bias, lowering.dtype))
    label = "compiled RMSNorm" if op.kind == "rms" else "compiled LayerNorm"
    return Lowered(lambda context, x: norm(x.shape[1])(x), label, None)


def _rope(lowering: Lowering, op: Rope, fused: Fused[Kernel], weights: Weights) -> Lowered:
    index, dim = lowering.rotations.index(op), op.facts.rotary_dim or op.head_dim
    rotate = by_width(
        lambda width: rotated_heads(width, op.head_dim, dim, op.facts.interleaved, lowering.dtype, op.start)
    )

    def rope(context: StepContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = tuple(rotate(x.shape[1])(x, *context.rotations[index]) for x in inputs)
        return made if len(made) > 1 else made[0]

    return Lowered(rope, "compiled rotation", None)


def _kv_write(lowering: Lowering, op: KVWrite, fused: Fused[Kernel], weights: Weights) -> Lowered:
    cache = cache_of(lowering, fused.nodes[0])

    def write(context: StepContext, k: Tensor, v: Tensor | None = None) -> None:
        write_kv(k, v, context.slots(cache), context.kv.layers[cache])

    return Lowered(write, "compiled KV write", None)


def _head_slice(lowering: Lowering, op: HeadSlice, fused: Fused[Kernel], weights: Weights) -> Lowered:
    cut = by_width(lambda width: sliced_heads(op, width, lowering.dtype))
    return Lowered(lambda context, x: cut(x.shape[1])(x), "compiled copy", None)


def _head_join(lowering: Lowering, op: HeadJoin, fused: Fused[Kernel], weights: Weights) -> Lowered:
    made: dict[tuple[int, int], Callable[..., Tensor]] = {}

    def join(context: StepContext | None, a: Tensor, b: Tensor) -> Tensor:
        widths = a.shape[1], b.shape[1]
        if widths not in made:
            made[widths] = joined_heads(op.num_heads, widths, lowering.dtype)
        return made[widths](a, b)

    return Lowered(join, "compiled copy", None)


def _head_linear(lowering: Lowering, op: HeadLinear, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """Few tokens in C++, which reads weights once; more in torch."""
    stored = weights.head_weights(op)
    few, rows = multiplied_heads(op, stored), stored[:, op.start : op.stop]
    weight = rows if op.transposed else rows.transpose(1, 2)  # [heads, in, out]

    def of_heads(context: StepContext | None, x: Tensor) -> Tensor:
        if x.shape[0] <= MOST_TOKENS:
            return few(x)
        heads = x.view(-1, op.num_heads, weight.shape[1]).transpose(0, 1)
        return torch.bmm(heads, weight).transpose(0, 1).flatten(1)

    return Lowered(of_heads, f"compiled; more than {MOST_TOKENS} tokens: batched product", None)


def _gated(lowering: Lowering, op: Gated, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return _combining("gated", op.act)


def _activation(lowering: Lowering, op: Activation, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return _combining("activated", op.act)


def _add(lowering: Lowering, op: Add, fused: Fused[Kernel], weights: Weights) -> Lowered:
    add = by_width(lambda width: Combine("add", width))
    first, second = fused.nodes[0].inputs
    if first in fused.last_use and first != second:
        return Lowered(lambda context, a, b: add(a.shape[1])(a, b, a), "compiled add", None)
    return Lowered(lambda context, a, b=None: add(a.shape[1])(a, a if b is None else b), "compiled add", None)


def _gate(lowering: Lowering, op: Gate, fused: Fused[Kernel], weights: Weights) -> Lowered:
    by_one = by_width(lambda width: Combine("gate_all", width))
    each = by_width(lambda width: Combine("gate", width))

    def gate(context: StepContext | None, x: Tensor, gates: Tensor) -> Tensor:
        combine: Combine = (each if gates.shape[1] == x.shape[1] else by_one)(x.shape[1])
        return combine(x, gates)

    return Lowered(gate, "compiled gate", None)


def _position_scale(lowering: Lowering, op: PositionScale, fused: Fused[Kernel], weights: Weights) -> Lowered:
    scale = by_width(lambda width: scaled_by_position(width, op, lowering.dtype))

    def scaled(context: StepContext, x: Tensor) -> Tensor:
        made: Tensor = scale(x.shape[1])(x, context.positions)
        return made

    return Lowered(scaled, "compiled, by position", None)


def _scale(lowering: Lowering, op: Scale, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return _combining("scaled", factor=scale_factor(lowering, op))


def _scale_by(lowering: Lowering, op: ScaleBy, fused: Fused[Kernel], weights: Weights) -> Lowered:
    factors = weights.small(op.name, (op.size,)).to(lowering.dtype)
    if op.size == 1:
        return _combining("scaled", factor=float(factors))
    times = Combine("times", op.size)

    def scaled(context: StepContext | None, x: Tensor) -> Tensor:
        return times(x, factors.expand(x.shape[0], -1))

    return Lowered(scaled, "compiled, times", None)


def _slice(lowering: Lowering, op: Slice, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, x: x[:, op.start : op.stop], "view", None)


def _soft_cap(lowering: Lowering, op: SoftCap, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return _combining("capped", factor=op.cap)


def _combining(kind: str, act: str | None = None, factor: float = 1.0) -> Lowered:
    made = by_width(lambda width: Combine(kind, width, act, factor))
    label = f"compiled {act}" if act else f"compiled, {kind}"
    return Lowered(lambda context, a, b=None: made(a.shape[1])(a, b), label, None)


def _count_experts(lowering: Lowering, op: CountExperts, fused: Fused[Kernel], weights: Weights) -> Lowered:
    counts = weights.expert_counts(op)  # no token is padding on a CPU
    return Lowered(lambda context, ids: count_experts(ids, counts), "compiled", None)


def by_width(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """``make(width)``, once for each number of features: ranks have some of a layer's."""
    made: dict[int, Any] = {}

    def of(width: int) -> Any:
        if width not in made:
            made[width] = make(width)
        return made[width]

    return of


_LOWER: dict[type[Op], LowerOp] = {
    Embed: _embed,
    Linear: _linear,
    Norm: _norm,
    Rope: _rope,
    HeadSlice: _head_slice,
    HeadJoin: _head_join,
    HeadLinear: _head_linear,
    KVWrite: _kv_write,
    Gated: _gated,
    Activation: _activation,
    Add: _add,
    Gate: _gate,
    PositionScale: _position_scale,
    Scale: _scale,
    ScaleBy: _scale_by,
    Slice: _slice,
    SoftCap: _soft_cap,
    CountExperts: _count_experts,
}
