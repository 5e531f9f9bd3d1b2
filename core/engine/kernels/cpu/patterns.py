"""Sequences of ops on the C++ kernels of the core and of plugins: of tensors, or of values
(:mod:`engine.kernels.cpu.program`)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.contracts.attention_kernel import NativeAttention
from engine.contracts.ops import Attention, Norm
from engine.kernels.context import StepContext
from engine.kernels.cpu import expert_ops, recurrent
from engine.kernels.cpu.expert_ops import MOST_GROUPS
from engine.kernels.cpu.layer_ops import HeadNorm, RotateAndWrite, compiled_gate, compiled_norm
from engine.kernels.cpu.ops import native_linear, native_of, obstacle, single_kernels
from engine.kernels.cpu.program import NotNative, Value, empty, run
from engine.kernels.cpu.sources import rms
from engine.kernels.patterns import (
    ChooseExperts,
    DeltaNetwork,
    GateUp,
    LinearAdd,
    MixExperts,
    NormHead,
    QKVWrite,
    attention,
    choose_experts,
    delta_network,
    gate_up,
    linear_add,
    mix_experts,
    norm_head,
    qkv_write,
)
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights, cache_of
from engine.kernels.torch.experts import mixed_by_torch
from engine.kernels.torch.norms import Norm as NormCall
from engine.kernels.torch.ops import head_call, lower_attention, sinks_of
from engine.kernels.torch.patterns import lower_linear_add
from engine.models.fuse import Fused
from engine.native import ACTIVATIONS, NativeCall

NORM = "compiled RMSNorm"


def cpu_kernels() -> tuple[Kernel, ...]:
    """What runs on a CPU with a compiler, in float32 and bfloat16, where it suits."""
    return (
        Kernel(qkv_write, lower_qkv_write, lambda lowering, what: rms(what.norm, what.q_norm, what.k_norm)),
        Kernel(attention, lower_native_attention),
        Kernel(gate_up, lower_gate_up, lambda lowering, what: rms(what.norm) and what.act in ACTIVATIONS),
        Kernel(linear_add, lower_add),
        Kernel(norm_head, lower_head, lambda lowering, what: rms(what.norm)),
        Kernel(choose_experts, lower_choose, lambda lowering, what: what.route.groups <= MOST_GROUPS),
        Kernel(mix_experts, lower_mix),
        Kernel(delta_network, lower_delta_network, lambda lowering, what: what.conv.act == "silu"),
        *single_kernels(),
    )


def native_norm(lowering: Lowering, op: Norm, weights: Weights) -> NormCall:
    return compiled_norm(weights.norm(op), op.eps, lowering.dtype)


def lower_qkv_write(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: QKVWrite = fused.what
    num_heads, num_kv_heads, head_dim = what.num_heads, what.num_kv_heads, what.head_dim
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

    compiled = ("rotation",) * (rotation is not None) + ("KV write",) * writes
    labels = ["" if what.norm is None else NORM, packed.label, f"compiled {' and '.join(compiled)}" if compiled else ""]
    labels.append("" if writes else "index_copy KV write")
    return Lowered(qkv_rope_write, ", ".join(filter(None, labels)), obstacle(packed))


def lower_native_attention(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    op: Attention = fused.nodes[0].op  # type: ignore[assignment]
    kernel, index = lowering.attention, cache_of(lowering, fused.nodes[0])
    of_tensors = lower_attention(lowering, op, fused, weights)
    more = () if not op.sinks else (sinks_of(fused, weights),)

    def attend(context: StepContext, q: Tensor) -> Tensor:
        if not isinstance(q, Value):
            made: Tensor = of_tensors.call(context, q)
            return made
        if not isinstance(kernel, NativeAttention):
            raise NotNative("the attention kernel has no native calls")
        cache = context.kv.layers[index]
        out = empty(q, "attended", (q.shape[0], op.num_heads * op.out_dim))

        def call(q: Tensor, out: Tensor, *held: Tensor) -> NativeCall:
            found = kernel.call(context.prepared[cache.group], op, q, cache, out, *more)
            if found is None:
                raise NotNative(f"attention is computed by {of_tensors.label}")
            return found

        run(call, q.view(-1, op.num_heads, op.head_dim), out, cache.k, cache.v)
        return out

    return Lowered(attend, of_tensors.label, None)


def lower_gate_up(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: GateUp = fused.what
    norm, packed = native_norm(lowering, what.norm, weights), weights.linear(what.gate_up)
    gate, apply_gated, act = compiled_gate(what.act, lowering.dtype), packed.apply_gated, what.act

    def gated(context: StepContext, x: Tensor) -> Tensor:
        normed = norm(x)
        if isinstance(normed, Value):
            y = empty(normed, "gated", (normed.shape[0], packed.out_features // 2))
            run(partial(native_of(packed), act=act), normed, y)
            return y
        return gate(packed.apply(normed)) if apply_gated is None else apply_gated(normed, act)

    how = "compiled gate" if apply_gated is None else "gate in the linear"
    return Lowered(gated, f"{NORM}, {packed.label}, {how}", obstacle(packed))


def lower_add(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: LinearAdd = fused.what
    packed, of_tensors = weights.linear(what.linear), lower_linear_add(lowering, fused, weights)
    overwrites = fused.inputs[1] in fused.last_use

    def add(context: StepContext, x: Tensor, residual: Tensor) -> Tensor:
        if not isinstance(residual, Value):
            made: Tensor = of_tensors.call(context, x, residual)
            return made
        y = residual if overwrites else empty(residual, "added", residual.shape)
        run(lambda x, residual, y: native_of(packed)(x, y, residual), x, residual, y)
        return y

    return Lowered(add, of_tensors.label, obstacle(packed))


def lower_head(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: NormHead = fused.what
    norm, packed = native_norm(lowering, what.norm, weights), weights.linear(what.head.spec, tied=what.head.tied)
    project = head_call(native_linear(packed))
    return Lowered(lambda context, x: project(context, norm(x)), f"{NORM}, {packed.label}", obstacle(packed))


def lower_choose(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: ChooseExperts = fused.what
    names, shape = (what.route.correction, what.route.expert_scale), (what.route.num_experts,)
    correction, scale = (None if name is None else weights.small(name, shape) for name in names)
    choose = expert_ops.ChooseExperts(what.route, *weights.router(what.router), correction, lowering.dtype, scale)
    return Lowered(lambda context, x: choose(x), "compiled router and top-k", None)


def lower_delta_network(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: DeltaNetwork = fused.what
    conv, rule = what.conv, what.rule
    taps = weights.small(f"{conv.name}.weight", (conv.features, 1, conv.kernel))[:, 0].T.contiguous()
    rate, bias = (weights.small(name, (rule.num_heads,)) for name in (rule.rate, rule.bias))
    network = recurrent.DeltaNetwork(conv, rule, taps, rate, bias, lowering.dtype)
    inputs, memory = (lowering.first_cache + cache for cache in what.caches)

    def remember(context: StepContext, q: Tensor, k: Tensor, v: Tensor, write: Tensor, decay: Tensor) -> Tensor:
        kv = context.kv
        batch = context.batches[kv.group_of[inputs]]
        return network((q, k, v), write, decay, batch, kv.states[inputs], kv.states[memory])

    return Lowered(remember, "compiled, block by block", None)


def lower_mix(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """By native calls on the experts that were chosen, each with all of its rows."""
    what: MixExperts = fused.what
    pairs = weights.experts(what.experts)
    of_tensors = mixed_by_torch(what.experts, pairs)
    overwrites = what.adds and fused.inputs[3] in fused.last_use
    native, why = None, ""
    try:
        native = expert_ops.MixExperts(what.experts, pairs, lowering.dtype)
    except NotNative as error:
        why = str(error)

    def mix(context: StepContext, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
        if native is not None:
            return native(x, ids, shares, residual, residual if overwrites else None)
        if isinstance(x, Value):
            raise NotNative(why)
        made = of_tensors(x, ids, shares)
        if residual is None:
            return made
        return residual.add_(made) if overwrites else residual + made

    labels = " and ".join(dict.fromkeys(packed.label for packed in pairs[0]))
    chosen = f"{what.experts.num_experts} experts, {what.experts.top_k} a token: {labels}"
    return Lowered(mix, f"{chosen}, add" if what.adds else chosen, why or None)
