"""Sequences of ops on the C++ kernels of the core and of plugins: of tensors, or of values
(:mod:`engine.kernels.cpu.program`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from engine.contracts.attention_kernel import NativeAttention
from engine.contracts.graph import Node
from engine.contracts.ops import Attention, Embed, Linear, Norm
from engine.contracts.quantizer import NativeLinear, PackedLinear
from engine.kernels.cpu import expert_ops
from engine.kernels.cpu.expert_ops import MOST_GROUPS
from engine.kernels.cpu.layer_ops import HeadNorm, RotateAndWrite, compiled_gate, compiled_norm
from engine.kernels.cpu.program import NotNative, Value, empty, run
from engine.kernels.cpu.row_ops import lookup
from engine.kernels.model import StepContext
from engine.kernels.sequences import (
    ChooseExperts,
    GateUp,
    LinearAdd,
    MixExperts,
    NormHead,
    QKVWrite,
    attention,
    choose_experts,
    gate_up,
    linear_add,
    mix_experts,
    norm_head,
    qkv_write,
)
from engine.kernels.settings import MOST_TOKENS, Kernel, Lowered, Lowering, Weights, cache_of
from engine.kernels.torch.experts import mixed_by_torch
from engine.kernels.torch.norms import Norm as NormCall
from engine.kernels.torch.ops import head_call, lower_attention, part_columns
from engine.kernels.torch.sequences import lower_linear_add
from engine.models.fuse import Fused, Match
from engine.models.sharding import check_heads
from engine.native import ACTIVATIONS, NativeCall

NORM = "compiled RMSNorm"


def cpu_kernels() -> tuple[Kernel, ...]:
    """What runs on a CPU with a compiler, in float32 and bfloat16, where it suits."""
    return (
        Kernel(qkv_write, lower_qkv_write, lambda lowering, what: _rms(what.norm, what.q_norm, what.k_norm)),
        Kernel(attention, lower_native_attention),
        Kernel(gate_up, lower_gate_up, lambda lowering, what: _rms(what.norm) and what.act in ACTIVATIONS),
        Kernel(linear_add, lower_add),
        Kernel(norm_head, lower_head, lambda lowering, what: _rms(what.norm)),
        Kernel(choose_experts, lower_choose, lambda lowering, what: what.route.groups <= MOST_GROUPS),
        Kernel(mix_experts, lower_mix),
        Kernel(one_linear, lower_linear),
        Kernel(one_norm, lower_norm, lambda lowering, what: _rms(what)),
        Kernel(one_embed, lower_embed),
    )


def _rms(*norms: Norm | None) -> bool:
    return all(norm is None or norm.kind == "rms" for norm in norms)


def one_linear(nodes: Sequence[Node]) -> Match | None:
    op = nodes[0].op
    return Match(op, 1, (op.spec,)) if isinstance(op, Linear) else None


def one_norm(nodes: Sequence[Node]) -> Match | None:
    return Match(nodes[0].op, 1) if isinstance(nodes[0].op, Norm) else None


def one_embed(nodes: Sequence[Node]) -> Match | None:
    return Match(nodes[0].op, 1) if isinstance(nodes[0].op, Embed) else None


def native_linear(packed: PackedLinear) -> Callable[[Tensor], Tensor]:
    """``apply`` of tensors, the native call of values."""

    def linear(x: Tensor) -> Tensor:
        if not isinstance(x, Value):
            return packed.apply(x)
        y = empty(x, "product", (x.shape[0], packed.out_features))
        run(_native(packed), x, y)
        return y

    return linear


def native_norm(lowering: Lowering, op: Norm, weights: Weights) -> NormCall:
    return compiled_norm(weights.norm(op), op.eps, lowering.dtype)


def _native(packed: PackedLinear) -> NativeLinear:
    if packed.native is None:
        raise NotNative(f"its linear layers ({packed.label}) have no native calls")
    return packed.native


def lower_qkv_write(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: QKVWrite = fused.what
    check_heads(what.num_heads, what.num_kv_heads, lowering.tp)
    num_heads, num_kv_heads, head_dim = what.num_heads // lowering.tp, what.num_kv_heads // lowering.tp, what.head_dim
    norm = (lambda x: x) if what.norm is None else native_norm(lowering, what.norm, weights)
    packed = weights.linear(what.qkv)
    linear = native_linear(packed)
    q_norm, k_norm = (None if op is None else HeadNorm(weights.norm(op), op.eps) for op in (what.q_norm, what.k_norm))
    rotate_and_write = RotateAndWrite(
        num_heads, num_kv_heads, head_dim, what.rotary_dim, q_norm, k_norm, lowering.dtype
    )
    rotation = None if what.rope is None else lowering.rotations.index(what.rope)
    writes, cache = lowering.stores_kv_as_is, lowering.first_cache + what.cache

    def qkv_rope_write(context: StepContext, x: Tensor) -> Tensor:
        qkv = linear(norm(x))
        tables = None if rotation is None else context.rotations[rotation]
        slots = context.slots(cache)
        rotate_and_write(qkv, tables, slots, context.kv.layers[cache] if writes else None)
        if not writes:
            heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
            k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
            context.kv.write(cache, slots, k, v)
        return qkv[:, : num_heads * head_dim]

    label = "compiled rotation" + (" and KV write" if writes else ", index_copy KV write")
    return Lowered(qkv_rope_write, f"{NORM}, {packed.label}, {label}", _obstacle(packed))


def lower_native_attention(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    op: Attention = fused.nodes[0].op  # type: ignore[assignment]
    kernel, index = lowering.attention, cache_of(lowering, fused.nodes[0])
    of_tensors = lower_attention(lowering, op, fused, weights)

    def attend(context: StepContext, q: Tensor) -> Tensor:
        if not isinstance(q, Value):
            made: Tensor = of_tensors.call(context, q)
            return made
        if not isinstance(kernel, NativeAttention):
            raise NotNative("the attention kernel has no native calls")
        cache = context.kv.layers[index]
        out = empty(q, "attended", (q.shape[0], op.num_heads * op.head_dim))

        def call(q: Tensor, out: Tensor, *held: Tensor) -> NativeCall:
            found = kernel.call(context.prepared[cache.group], op, q, cache, out)
            if found is None:
                raise NotNative(f"attention is computed by {of_tensors.label}")
            return found

        run(call, q.view(-1, op.num_heads, op.head_dim), out, cache.k, cache.v)
        return out

    return Lowered(attend, of_tensors.label, None)


def lower_gate_up(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: GateUp = fused.what
    norm, packed = native_norm(lowering, what.norm, weights), weights.linear(what.gate_up, act=what.act)
    gate, apply_gated, act = compiled_gate(what.act, lowering.dtype), packed.apply_gated, what.act

    def gated(context: StepContext, x: Tensor) -> Tensor:
        normed = norm(x)
        if isinstance(normed, Value):
            y = empty(normed, "gated", (normed.shape[0], packed.out_features // 2))
            run(partial(_native(packed), act=act), normed, y)
            return y
        return gate(packed.apply(normed)) if apply_gated is None else apply_gated(normed, act)

    how = "compiled gate" if apply_gated is None else "gate in the linear"
    return Lowered(gated, f"{NORM}, {packed.label}, {how}", _obstacle(packed))


def lower_add(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: LinearAdd = fused.what
    packed, of_tensors = weights.linear(what.linear), lower_linear_add(lowering, fused, weights)
    overwrites = fused.inputs[1] in fused.last_use

    def add(context: StepContext, x: Tensor, residual: Tensor) -> Tensor:
        if not isinstance(residual, Value):
            made: Tensor = of_tensors.call(context, x, residual)
            return made
        y = residual if overwrites else empty(residual, "added", residual.shape)
        run(lambda x, residual, y: _native(packed)(x, y, residual), x, residual, y)
        return y

    return Lowered(add, of_tensors.label, _obstacle(packed))


def lower_head(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: NormHead = fused.what
    norm, packed = native_norm(lowering, what.norm, weights), weights.linear(what.head.spec, tied=what.head.tied)
    project = head_call(lowering, native_linear(packed))
    return Lowered(lambda context, x: project(context, norm(x)), f"{NORM}, {packed.label}", _obstacle(packed))


def lower_choose(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: ChooseExperts = fused.what
    correction = what.route.correction
    shift = None if correction is None else weights.small(correction, (what.route.num_experts,))
    choose = expert_ops.ChooseExperts(what.route, *weights.router(what.router), shift, lowering.dtype)
    return Lowered(lambda context, x: choose(x), "compiled router and top-k", None)


def lower_mix(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """Few tokens by native calls on the experts that were chosen; more in torch, each expert with all of its rows."""
    what: MixExperts = fused.what
    pairs = weights.experts(what.experts)
    of_tensors = mixed_by_torch(lowering, what.experts, pairs)
    overwrites = what.adds and fused.inputs[3] in fused.last_use
    few, why = None, None
    try:
        few = expert_ops.MixExperts(what.experts, pairs, lowering.dtype)
    except NotNative as error:
        why = str(error)

    def mix(context: StepContext, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
        if few is not None and x.shape[0] <= MOST_TOKENS and lowering.tp == 1:
            return few(x, ids, shares, residual, residual if overwrites else None)
        if isinstance(x, Value):
            raise NotNative(why or "ranks exchange their sums")
        made = of_tensors(x, ids, shares)
        if residual is None:
            return made
        return residual.add_(made) if overwrites else residual + made

    labels = " and ".join(dict.fromkeys(packed.label for packed in pairs[0]))
    chosen = f"{what.experts.num_experts} experts, {what.experts.top_k} a token: {labels}"
    return Lowered(mix, f"{chosen}, add" if what.adds else chosen, why)


def lower_linear(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    op: Linear = fused.what
    packed = weights.linear(op.spec, tied=op.tied)
    linear = native_linear(packed)
    if op.spec.kind == "head":
        return Lowered(head_call(lowering, linear), packed.label, _obstacle(packed))
    linear = lowering.reduced(linear) if op.spec.shard == "in" else linear
    columns = part_columns(lowering, op.spec)

    def several(context: StepContext | None, x: Tensor) -> tuple[Tensor, ...]:
        y = linear(x)
        return tuple(y[:, part] for part in columns)

    call = several if len(columns) > 1 else lambda context, x: linear(x)
    return Lowered(call, packed.label, _obstacle(packed))


def lower_norm(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    op: Norm = fused.what
    norm = native_norm(lowering, op, weights)

    def normed(context: StepContext | None, x: Tensor) -> Tensor:
        if x.shape[1] == op.size:
            return norm(x)
        if isinstance(x, Value):
            raise NotNative("it norms heads by themselves")
        return norm(x.reshape(-1, op.size)).view(x.shape)

    return Lowered(normed, NORM, None)


def lower_embed(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    table = weights.embedding(fused.what)
    return Lowered(lambda context, tokens: lookup(table, tokens, name="embedded"), "table lookup", None)


def _obstacle(packed: PackedLinear) -> str | None:
    """Why a program cannot call this layer."""
    return None if packed.native is not None else f"its linear layers ({packed.label}) have no native calls"
