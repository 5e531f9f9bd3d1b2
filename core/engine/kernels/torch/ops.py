"""Each op by itself, in torch: what runs where nothing is fused, and the definition of what fused kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.contracts.graph import Node
from engine.contracts.ops import (
    Activation,
    Add,
    AllGather,
    AllReduce,
    Attention,
    CountExperts,
    DeltaRule,
    Embed,
    Experts,
    Gate,
    Gated,
    GatherTokens,
    HeadJoin,
    HeadLinear,
    HeadSlice,
    KVWrite,
    Linear,
    LinearSpec,
    Norm,
    Op,
    OwnExperts,
    PositionScale,
    Rope,
    Route,
    Router,
    Scale,
    ScaleBy,
    SharedAttention,
    ShortConv,
    Slice,
    SoftCap,
    SumTokens,
    TorchFunction,
)
from engine.kernels.checks.function import tried
from engine.kernels.context import StepContext
from engine.kernels.cpu.program import NotNative, Value
from engine.kernels.cpu.row_ops import StepTable, Table, lookup_own, widen
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights, cache_of
from engine.kernels.torch.collectives import (
    lower_all_gather,
    lower_all_reduce,
    lower_gather_tokens,
    lower_own_experts,
    lower_sum_tokens,
)
from engine.kernels.torch.experts import lower_count_experts, lower_experts, lower_route, lower_router
from engine.kernels.torch.norms import Norm as NormCall
from engine.kernels.torch.norms import cpu_norm, gpu_norm, layer_norm, rms_norm
from engine.kernels.torch.recurrent import lower_delta_rule, lower_short_conv
from engine.kernels.torch.reference import activated, gated, soft_capped
from engine.kernels.torch.rope import rotate, rotate_interleaved, rotate_paired
from engine.kernels.torch.shared_attention import lower_shared_attention
from engine.models.fuse import Fused, Match

LowerOp = Callable[[Lowering, Any, Fused[Kernel], Weights], Lowered]


def single_kernels() -> tuple[Kernel, ...]:
    """A kernel for each op."""
    return tuple(_single(kind, lower) for kind, lower in _LOWER.items())


def _single(kind: type[Op], lower: LowerOp) -> Kernel:
    def match(nodes: Sequence[Node]) -> Match | None:
        op = nodes[0].op
        if not isinstance(op, kind):
            return None
        return Match(op, 1, op.linears)

    return Kernel(match, lambda lowering, fused, weights: lower(lowering, fused.what, fused, weights))


def torch_norm(lowering: Lowering, op: Norm, weights: Weights) -> NormCall:
    """An RMSNorm over the last axis of ``[..., size]``."""
    weight = weights.norm(op)
    if not lowering.fused:
        return lambda x: rms_norm(x, weight, op.eps)
    return cpu_norm(weight, op.eps) if lowering.on_cpu else gpu_norm(weight, op.eps, lowering.dtype)


def norm_label(lowering: Lowering) -> str:
    if not lowering.fused:
        return "reference norm"
    return "vector-norm RMSNorm" if lowering.on_cpu else "torch RMSNorm"


def _embed(lowering: Lowering, op: Embed, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return lower_embed(op, weights, not_native="torch computes it")


def lower_embed(op: Embed, weights: Weights, not_native: str | None) -> Lowered:
    table, rows = weights.embedding(op), op.rows
    if rows is None:
        return Lowered(StepTable(Table(table)), "table lookup", not_native)
    own, start = "lookup of own rows", rows.start
    return Lowered(lambda context, tokens: lookup_own(table, start, tokens, name="embedded"), own, not_native)


def _norm(lowering: Lowering, op: Norm, fused: Fused[Kernel], weights: Weights) -> Lowered:
    if op.kind == "rms":
        norm, label = torch_norm(lowering, op, weights), norm_label(lowering)
    else:
        weight, bias = weights.norm(op), weights.norm_bias(op)
        norm, label = (lambda x: layer_norm(x, weight, bias, op.eps)), "torch LayerNorm"

    def normed(context: StepContext | None, x: Tensor) -> Tensor:
        return norm(x) if x.shape[1] == op.size else norm(x.view(-1, x.shape[1] // op.size, op.size)).flatten(1)

    return Lowered(normed, label)


def _linear(lowering: Lowering, op: Linear, fused: Fused[Kernel], weights: Weights) -> Lowered:
    packed = weights.linear(op.spec, tied=op.tied)
    return Lowered(linear_call(op.spec, packed.apply if lowering.fused else packed.reference), packed.label)


def linear_call(spec: LinearSpec, linear: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """float32 logits of a head; of another layer its output, each part apart where there are several."""
    if spec.kind == "head":
        return head_call(linear)
    ends = list(accumulate(spec.outputs))
    columns = [slice(end - size, end) for end, size in zip(ends, spec.outputs, strict=True)]

    def several(context: StepContext | None, x: Tensor) -> tuple[Tensor, ...]:
        y = linear(x)
        return tuple(y[:, part] for part in columns)

    return several if len(columns) > 1 else lambda context, x: linear(x)


def head_call(linear: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """float32 logits."""
    return lambda context, normed: widen(linear(normed))


def _rope(lowering: Lowering, op: Rope, fused: Fused[Kernel], weights: Weights) -> Lowered:
    index = lowering.rotations.index(op)
    rotate, label = rotation(lowering, index)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(-1, x.shape[1] // op.head_dim, op.head_dim)
        if not op.start:
            return rotate(heads, cos, sin).flatten(1)
        return torch.cat((heads[:, :, : op.start], rotate(heads[:, :, op.start :], cos, sin)), dim=2).flatten(1)

    def rope(context: StepContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = tuple(rotated(x, *context.rotations[index]) for x in inputs)
        return made if len(made) > 1 else made[0]

    return Lowered(rope, label)


def rotation(lowering: Lowering, index: int) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]:
    """How heads are rotated by the step's tables of this index, and what that is called."""
    if lowering.rotations[index].facts.interleaved:
        return rotate_interleaved, "interleaved rotation"
    return (rotate_paired, "paired rotation") if rotates_whole(lowering, index) else (rotate, "reference rotation")


def rotates_whole(lowering: Lowering, index: int) -> bool:
    """Whether torch's fast rotation applies, and the step's tables are made for it."""
    op = lowering.rotations[index]
    return lowering.kernels == "torch" and op.facts.rotary_dim in (None, op.head_dim) and not op.facts.interleaved


def _slice(lowering: Lowering, op: Slice, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, x: x[:, op.start : op.stop], "view")


def _head_slice(lowering: Lowering, op: HeadSlice, fused: Fused[Kernel], weights: Weights) -> Lowered:
    def sliced(context: StepContext | None, x: Tensor) -> Tensor:
        return x.view(-1, x.shape[1] // op.head_dim, op.head_dim)[:, :, op.start : op.stop].flatten(1)

    return Lowered(sliced, "torch")


def _head_join(lowering: Lowering, op: HeadJoin, fused: Fused[Kernel], weights: Weights) -> Lowered:
    def joined(context: StepContext | None, *parts: Tensor) -> Tensor:
        heads = [part.view(-1, op.num_heads, part.shape[1] // op.num_heads) for part in parts]
        return torch.cat(heads, dim=2).flatten(1)

    return Lowered(joined, "torch")


def _head_linear(lowering: Lowering, op: HeadLinear, fused: Fused[Kernel], weights: Weights) -> Lowered:
    stored = weights.head_weights(op)[:, op.start : op.stop]
    weight = (stored if op.transposed else stored.transpose(1, 2)).contiguous()  # [heads, in, out]

    def of_heads(context: StepContext | None, x: Tensor) -> Tensor:
        heads = x.view(-1, op.num_heads, weight.shape[1]).transpose(0, 1)
        return torch.bmm(heads, weight).transpose(0, 1).flatten(1)

    return Lowered(of_heads, "batched product")


def _kv_write(lowering: Lowering, op: KVWrite, fused: Fused[Kernel], weights: Weights) -> Lowered:
    cache = cache_of(lowering, fused.nodes[0])

    def write(context: StepContext, k: Tensor, v: Tensor | None = None) -> None:
        keys, values = (None if x is None else x.view(-1, x.shape[1] // op.head_dim, op.head_dim) for x in (k, v))
        assert keys is not None
        context.kv.write(cache, context.slots(cache), keys, values)

    return Lowered(write, "index_copy")


def lower_attention(lowering: Lowering, op: Attention, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """By the plan's attention kernel."""
    kernel, index = lowering.attention, cache_of(lowering, fused.nodes[0])
    more = () if not op.sinks else (sinks_of(fused, weights),)
    forward: Callable[..., Tensor] = kernel.forward

    def attention(context: StepContext, q: Tensor) -> Tensor:
        heads, cache = q.view(-1, op.num_heads, op.head_dim), context.kv.layers[index]
        return forward(context.prepared[cache.group], op, heads, cache, *more)

    return Lowered(attention, kernel.label(op, lowering.dtype_name, lowering.kv_format))


def sinks_of(fused: Fused[Kernel], weights: Weights) -> Tensor:
    """float32 ``[num_heads]``"""
    (node,) = fused.nodes
    assert isinstance(node.op, Attention) and node.sinks is not None
    if node.heads is None:
        return weights.small(node.sinks, (node.op.num_heads,))
    return weights.small(node.sinks, (node.heads.whole,))[node.heads.start : node.heads.stop].contiguous()


def _gated(lowering: Lowering, op: Gated, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, gate, up: gated(gate, up, op), f"torch {op.act}")


def _activation(lowering: Lowering, op: Activation, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, x: activated(x, op.act), f"torch {op.act}")


def _add(lowering: Lowering, op: Add, fused: Fused[Kernel], weights: Weights) -> Lowered:
    first, second = fused.nodes[0].inputs
    if first in fused.last_use and first != second:
        return Lowered(lambda context, a, b: a.add_(b), "in place")
    return Lowered(lambda context, a, b=None: a + (a if b is None else b), "torch add")


def _gate(lowering: Lowering, op: Gate, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, x, gate: x * gate.sigmoid(), "torch")


def _position_scale(lowering: Lowering, op: PositionScale, fused: Fused[Kernel], weights: Weights) -> Lowered:
    def scaled(context: StepContext, x: Tensor) -> Tensor:
        past = ((context.positions + op.offset) // op.length).float()
        return (x * (1.0 + op.beta * torch.log1p(past))[:, None]).to(x.dtype)

    return Lowered(scaled, "torch")


def scale_factor(lowering: Lowering, op: Scale) -> float:
    return float(torch.tensor(op.factor, dtype=lowering.dtype)) if op.rounded else op.factor


def _scale(lowering: Lowering, op: Scale, fused: Fused[Kernel], weights: Weights) -> Lowered:
    factor = scale_factor(lowering, op)
    return Lowered(lambda context, x: x * factor, "torch")


def _scale_by(lowering: Lowering, op: ScaleBy, fused: Fused[Kernel], weights: Weights) -> Lowered:
    factor = weights.small(op.name, (op.size,)).to(lowering.dtype)
    return Lowered(lambda context, x: x * factor, "torch")


def _soft_cap(lowering: Lowering, op: SoftCap, fused: Fused[Kernel], weights: Weights) -> Lowered:
    return Lowered(lambda context, x: soft_capped(x, op.cap), "torch")


def _torch_function(lowering: Lowering, op: TorchFunction, fused: Fused[Kernel], weights: Weights) -> Lowered:
    tensors = [weights.small(name, shape) for name, shape in op.tensors]
    function, name = tried(op, tensors, lowering.dtype, lowering.device), op.function.rpartition(":")[2]
    not_native = f"{name} is a function of torch"

    def computed(context: StepContext | None, *inputs: Tensor) -> Tensor:
        if any(isinstance(x, Value) for x in inputs):
            raise NotNative(not_native)
        return function(*inputs)

    return Lowered(computed, f"torch function {name}, unfused", not_native)


_LOWER: dict[type[Op], LowerOp] = {
    Embed: _embed,
    Norm: _norm,
    Linear: _linear,
    Rope: _rope,
    Slice: _slice,
    HeadSlice: _head_slice,
    HeadJoin: _head_join,
    HeadLinear: _head_linear,
    KVWrite: _kv_write,
    Attention: lower_attention,
    ShortConv: lower_short_conv,
    DeltaRule: lower_delta_rule,
    Gated: _gated,
    Activation: _activation,
    Add: _add,
    Gate: _gate,
    PositionScale: _position_scale,
    Scale: _scale,
    ScaleBy: _scale_by,
    SoftCap: _soft_cap,
    Router: lower_router,
    Route: lower_route,
    Experts: lower_experts,
    TorchFunction: _torch_function,
    AllReduce: lower_all_reduce,
    GatherTokens: lower_gather_tokens,
    SumTokens: lower_sum_tokens,
    AllGather: lower_all_gather,
    SharedAttention: lower_shared_attention,
    OwnExperts: lower_own_experts,
    CountExperts: lower_count_experts,
}
