"""Ops as chains of torch calls: the reference, and what runs where nothing is fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.contracts.model import RopeFacts
from engine.contracts.ops import Attention, LMHead, NormGateUpAct, NormQKVRopeWrite
from engine.contracts.quantizer import PackedLinear
from engine.kernels.cpu.rotation_tables import RotationTables
from engine.kernels.cpu.row_ops import widen
from engine.kernels.model import LoweredOp, StepContext
from engine.kernels.settings import LoweredHead, Lowering, Rotations
from engine.kernels.torch.norms import Norm, cpu_norm, rms_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.torch.rope import Rotary, paired, rotate, rotate_paired


def lower_rotations(lowering: Lowering, head_dim: int, max_position: int) -> Rotations:
    """Tables of every distinct rotation, once per step; with C++ kernels also of values."""
    rotaries = [Rotary(facts, head_dim, max_position, lowering.device) for facts in lowering.rope_kinds]
    whole = [rotates_whole(lowering, facts, head_dim) for facts in lowering.rope_kinds]

    def tables(positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        result = []
        for rotary, fast in zip(rotaries, whole, strict=True):
            cos, sin = rotary.cos_sin(positions, lowering.dtype if fast else torch.float32)
            result.append(paired(cos, sin) if fast else (cos, sin))
        return tuple(result)

    return RotationTables(tables) if lowering.native else tables


def rotates_whole(lowering: Lowering, facts: RopeFacts, head_dim: int) -> bool:
    """Whether torch's fast rotation applies."""
    return lowering.kernels == "torch" and facts.rotary_dim in (None, head_dim)


def lower_head(lowering: Lowering, op: LMHead, norm_weight: Tensor, head: PackedLinear) -> LoweredHead:
    norm, lm_head = lowering.norm(norm_weight, op.norm.eps), lower_lm_head(lowering, head)
    return LoweredHead(lambda hidden: lm_head(norm(hidden)), lm_head)


def lower_lm_head(lowering: Lowering, head: PackedLinear) -> Callable[[Tensor], Tensor]:
    """The vocabulary projection of rows that are normed."""
    linear = lowering.linear(head)

    def lm_head(normed: Tensor) -> Tensor:
        logits = linear(normed)
        if lowering.tp > 1:
            logits = lowering.parallelism.all_gather(logits, "tp", axis=-1)
        return widen(logits)

    return lm_head


def lower_qkv(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    num_heads, num_kv_heads = op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp
    head_dim, rotated_heads = op.head_dim, num_heads + num_kv_heads
    rotated_size = rotated_heads * head_dim
    norm, linear = lowering.input_norm(op.norm, norms), lowering.linear(packed)
    head_norm = _head_norm(lowering, op, norms, num_heads, num_kv_heads)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    turn = rotate_paired if op.rope and rotates_whole(lowering, op.rope, head_dim) else rotate

    def qkv_rope_write(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        qkv = linear(norm(residual, hidden_states))
        # Queries and keys are normed and rotated together: one kernel call instead of two.
        qk = qkv[:, :rotated_size].view(-1, rotated_heads, head_dim)
        if head_norm is not None:
            qk = head_norm(qk)
        if rotation is not None:
            qk = turn(qk, *context.rotations[rotation])
        v = qkv[:, rotated_size:].view(-1, num_kv_heads, head_dim)
        context.kv.write(layer, context.slot_mapping, qk[:, num_heads:], v)
        return residual, qk[:, :num_heads]

    return qkv_rope_write


def _head_norm(
    lowering: Lowering, op: NormQKVRopeWrite, norms: dict[str, Tensor], num_heads: int, num_kv_heads: int
) -> Norm | None:
    """Norm of each query and key head over ``head_dim``, as one norm over ``[heads, head_dim]``."""
    if op.q_norm is None and op.k_norm is None:
        return None
    if op.q_norm is None or op.k_norm is None or op.q_norm.eps != op.k_norm.eps:
        raise ValueError("NormQKVRopeWrite: expected q_norm and k_norm together and with one eps")
    weight = torch.cat(
        (
            norms[op.q_norm.name].expand(num_heads, op.head_dim),
            norms[op.k_norm.name].expand(num_kv_heads, op.head_dim),
        )
    )
    if lowering.on_cpu and lowering.fused:
        return cpu_norm(weight, op.q_norm.eps)
    eps = op.q_norm.eps
    return lambda x: rms_norm(x, weight, eps)


def lower_attention(lowering: Lowering, op: Attention, layer: int) -> LoweredOp:
    attend = lowering.attention.forward
    local = op if lowering.tp == 1 else _local_attention(op, lowering.tp)

    def attention(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        return residual, attend(context.prepared, local, hidden_states, context.kv.layers[layer])

    return attention


def _local_attention(op: Attention, tp: int) -> Attention:
    return Attention(
        num_heads=op.num_heads // tp,
        num_kv_heads=op.num_kv_heads // tp,
        head_dim=op.head_dim,
        scale=op.scale,
        window=op.window,
        soft_cap=op.soft_cap,
    )


def lower_gate_up(lowering: Lowering, op: NormGateUpAct, norms: dict[str, Tensor], packed: PackedLinear) -> LoweredOp:
    norm, linear, act = lowering.norm(norms[op.norm.name], op.norm.eps), lowering.linear(packed), op.act

    def gate_up(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        return residual, gated_activation(linear(norm(residual)), act)

    return gate_up


def lower_residual(lowering: Lowering, packed: PackedLinear) -> LoweredOp:
    linear = lowering.reduced(lowering.linear(packed))
    fused = packed.apply_add if lowering.fused and lowering.tp == 1 else None

    def fused_add(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        assert fused is not None
        return fused(hidden_states, residual), hidden_states

    def add_to_residual(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        return residual.add_(linear(hidden_states)), hidden_states

    return add_to_residual if fused is None else fused_add
