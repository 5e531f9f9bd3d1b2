"""Ops on the C++ kernels of ``cpu_ops.py``."""

from __future__ import annotations

from torch import Tensor

from engine.contracts.ops import NormGateUpAct, NormQKVRopeWrite
from engine.contracts.quantizer import PackedLinear
from engine.execution.cpu_ops import HeadNorm, RotateAndWrite, compiled_gate
from engine.execution.lowering.settings import Lowering
from engine.execution.model import LoweredOp, StepContext


def lower_qkv(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    num_heads, num_kv_heads, head_dim = op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp, op.head_dim
    norm, linear = lowering.input_norm(op.norm, norms), lowering.linear(packed)
    q_norm, k_norm = (None if spec is None else HeadNorm(norms[spec.name], spec.eps) for spec in (op.q_norm, op.k_norm))
    rotary_dim = 0 if op.rope is None else op.rope.rotary_dim or head_dim
    rotate_and_write = RotateAndWrite(num_heads, num_kv_heads, head_dim, rotary_dim, q_norm, k_norm, lowering.dtype)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    writes = lowering.stores_kv_as_is

    def qkv_rope_write(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        qkv = linear(norm(residual, carry))
        tables = None if rotation is None else context.rotations[rotation]
        keys, values = context.kv.layer(layer)[:2] if writes else (None, None)
        rotate_and_write(qkv, tables, context.slot_mapping, keys, values)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        if not writes:
            k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
            context.kv.write(layer, context.slot_mapping, k, v)
        return residual, heads[:, :num_heads]

    return qkv_rope_write


def lower_gate_up(lowering: Lowering, op: NormGateUpAct, norms: dict[str, Tensor], packed: PackedLinear) -> LoweredOp:
    norm, linear, act = lowering.norm(norms[op.norm.name], op.norm.eps), lowering.linear(packed), op.act
    apply_gated = packed.apply_gated
    if apply_gated is not None:
        return lambda residual, carry, context: (residual, apply_gated(norm(residual), act))
    gate = compiled_gate(act, lowering.dtype)
    return lambda residual, carry, context: (residual, gate(linear(norm(residual))))
