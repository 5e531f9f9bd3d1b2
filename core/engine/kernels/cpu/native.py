"""Ops on the C++ kernels of the core and of plugins: of tensors, or of values (:mod:`engine.kernels.cpu.program`)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.contracts.attention_kernel import NativeAttention
from engine.contracts.ops import Attention, NormGateUpAct, NormQKVRopeWrite
from engine.contracts.quantizer import NativeLinear, PackedLinear
from engine.kernels.cpu.layer_ops import HeadNorm, RotateAndWrite, compiled_gate
from engine.kernels.cpu.program import NotNative, Value, empty, run
from engine.kernels.model import LoweredOp, StepContext
from engine.kernels.settings import Linear, Lowering
from engine.kernels.torch import chain
from engine.native import NativeCall


def native_linear(packed: PackedLinear) -> Linear:
    """``apply`` of tensors, the native call of values."""

    def linear(x: Tensor) -> Tensor:
        if not isinstance(x, Value):
            return packed.apply(x)
        y = empty(x, "product", (x.shape[0], packed.out_features))
        run(_native(packed), x, y)
        return y

    return linear


def _native(packed: PackedLinear) -> NativeLinear:
    if packed.native is None:
        raise NotNative(f"its linear layers ({packed.label}) have no native calls")
    return packed.native


def lower_qkv(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    num_heads, num_kv_heads, head_dim = op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp, op.head_dim
    norm, linear = lowering.input_norm(op.norm, norms), native_linear(packed)
    q_norm, k_norm = (None if spec is None else HeadNorm(norms[spec.name], spec.eps) for spec in (op.q_norm, op.k_norm))
    rotary_dim = 0 if op.rope is None else op.rope.rotary_dim or head_dim
    rotate_and_write = RotateAndWrite(num_heads, num_kv_heads, head_dim, rotary_dim, q_norm, k_norm, lowering.dtype)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    writes = lowering.stores_kv_as_is

    def qkv_rope_write(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        qkv = linear(norm(residual, hidden_states))
        tables = None if rotation is None else context.rotations[rotation]
        rotate_and_write(qkv, tables, context.slot_mapping, context.kv.layers[layer] if writes else None)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        if not writes:
            k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
            context.kv.write(layer, context.slot_mapping, k, v)
        return residual, heads[:, :num_heads]

    return qkv_rope_write


def lower_attention(lowering: Lowering, op: Attention, layer: int) -> LoweredOp:
    kernel = lowering.attention
    of_tensors = chain.lower_attention(lowering, op, layer)

    def attention(residual: Tensor, queries: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        if not isinstance(queries, Value):
            return of_tensors(residual, queries, context)
        if not isinstance(kernel, NativeAttention):
            raise NotNative("the attention kernel has no native calls")
        cache = context.kv.layers[layer]
        out = empty(queries, "attended", (queries.shape[0], op.num_heads * op.head_dim))

        def call(q: Tensor, out: Tensor, *held: Tensor) -> NativeCall:
            found = kernel.call(context.prepared, op, q, cache, out)
            if found is None:
                raise NotNative(f"attention is computed by {kernel.label(op, lowering.dtype_name, cache.format)}")
            return found

        run(call, queries, out, cache.k, cache.v)
        return residual, out

    return attention


def lower_gate_up(lowering: Lowering, op: NormGateUpAct, norms: dict[str, Tensor], packed: PackedLinear) -> LoweredOp:
    norm, gate = lowering.norm(norms[op.norm.name], op.norm.eps), compiled_gate(op.act, lowering.dtype)
    apply_gated = packed.apply_gated

    def gate_up(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        x = norm(residual)
        if isinstance(x, Value):
            y = empty(x, "gated", (x.shape[0], packed.out_features // 2))
            run(partial(_native(packed), act=op.act), x, y)
            return residual, y
        return residual, gate(packed.apply(x)) if apply_gated is None else apply_gated(x, op.act)

    return gate_up


def lower_residual(lowering: Lowering, packed: PackedLinear) -> LoweredOp:
    of_tensors = chain.lower_residual(lowering, packed)

    def add(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        if not isinstance(residual, Value):
            return of_tensors(residual, hidden_states, context)
        run(lambda x, residual: _native(packed)(x, residual, residual), hidden_states, residual)
        return residual, hidden_states

    return add
