"""Sequences of ops as chains of torch calls that read and write less than the ops one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.ops import Norm
from engine.kernels.context import Rotate, StepContext
from engine.kernels.cpu.rotation_tables import RotationTables
from engine.kernels.patterns import GateUp, LinearAdd, QKVWrite, gate_up, linear_add, qkv_write
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights
from engine.kernels.torch.norms import Norm as NormCall
from engine.kernels.torch.norms import cpu_norm, rms_norm
from engine.kernels.torch.ops import norm_label, rotates_whole, rotation, torch_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.torch.rope import Rotary, paired
from engine.models.fuse import Fused


def torch_sequences() -> tuple[Kernel, ...]:
    """What torch's backend has beside a kernel for each op."""
    return (
        Kernel(qkv_write, lower_qkv_write, lambda lowering, what: _suits_qkv(what)),
        Kernel(gate_up, lower_gate_up, lambda lowering, what: what.norm.kind == "rms"),
        Kernel(linear_add, lower_linear_add),
    )


def _suits_qkv(what: QKVWrite) -> bool:
    """All norms are RMSNorms, and queries and keys are normed together or not at all."""
    norms = [norm for norm in (what.norm, what.q_norm, what.k_norm) if norm is not None]
    together = (what.q_norm is None) == (what.k_norm is None)
    alike = what.q_norm is None or what.k_norm is None or what.q_norm.eps == what.k_norm.eps
    return all(norm.kind == "rms" for norm in norms) and together and alike


def lower_rotations(lowering: Lowering, max_len: int) -> Rotate:
    """Tables of every distinct rotation, once per step; with C++ kernels also of values. ``max_len``: most tokens of a
    sequence."""
    rotaries = [Rotary(op.facts, op.head_dim, max_len, lowering.device) for op in lowering.rotations]
    if lowering.kernels == "triton":
        from engine.kernels.triton.rotation import rotation_tables  # Triton is imported only where it runs

        return lambda positions: tuple([rotation_tables(rotary, positions) for rotary in rotaries])
    whole = [rotates_whole(lowering, index) for index in range(len(rotaries))]

    def tables(positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        result = []
        for rotary, fast in zip(rotaries, whole, strict=True):
            cos, sin = rotary.cos_sin(positions, lowering.dtype if fast else torch.float32)
            result.append(paired(cos, sin) if fast else (cos, sin))
        return tuple(result)

    return RotationTables(tables) if lowering.native else tables


def input_norm(lowering: Lowering, op: Norm | None, weights: Weights) -> NormCall:
    """What a sequence's linear layer reads."""
    return (lambda x: x) if op is None else torch_norm(lowering, op, weights)


def lower_qkv_write(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: QKVWrite = fused.what
    norm, packed = input_norm(lowering, what.norm, weights), weights.linear(what.qkv)
    head_norm = _head_norm(lowering, what, weights)
    index = None if what.rope is None else lowering.rotations.index(what.rope)
    rotate, rotated = (None, "") if index is None else rotation(lowering, index)
    num_heads, num_kv_heads = what.num_heads, what.num_kv_heads
    head_dim, rotated_heads, linear = what.head_dim, num_heads + num_kv_heads, packed.apply
    rotated_size, cache = rotated_heads * head_dim, lowering.first_cache + what.cache

    def qkv_rope_write(context: StepContext, x: Tensor) -> Tensor:
        qkv = linear(norm(x))
        # Queries and keys are normed and rotated together: one kernel call instead of two.
        qk = qkv[:, :rotated_size].view(-1, rotated_heads, head_dim)
        if head_norm is not None:
            qk = head_norm(qk)
        if rotate is not None and index is not None:
            qk = rotate(qk, *context.rotations[index])
        v = qkv[:, rotated_size:].view(-1, num_kv_heads, head_dim)
        context.kv.write(cache, context.slots(cache), qk[:, num_heads:], v)
        return qk[:, :num_heads].flatten(1)

    labels = "" if what.norm is None else norm_label(lowering), packed.label, rotated, "index_copy KV write"
    return Lowered(qkv_rope_write, ", ".join(filter(None, labels)))


def _head_norm(lowering: Lowering, what: QKVWrite, weights: Weights) -> NormCall | None:
    """Norm of each query and key head over ``head_dim``, as one norm over ``[heads, head_dim]``."""
    if what.q_norm is None or what.k_norm is None:
        return None
    heads = ((what.q_norm, what.num_heads), (what.k_norm, what.num_kv_heads))
    weight = torch.cat([weights.norm(op).expand(count, what.head_dim) for op, count in heads])
    eps = what.q_norm.eps
    return cpu_norm(weight, eps) if lowering.on_cpu else lambda x: rms_norm(x, weight, eps)


def lower_gate_up(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: GateUp = fused.what
    norm, packed = torch_norm(lowering, what.norm, weights), weights.linear(what.gate_up)
    linear, act = packed.apply, what.act
    label = f"{norm_label(lowering)}, {packed.label}, in-place gate"
    return Lowered(lambda context, x: gated_activation(linear(norm(x)), act), label)


def lower_linear_add(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: LinearAdd = fused.what
    packed = weights.linear(what.linear)
    linear, apply_add = packed.apply, packed.apply_add
    overwrites = fused.inputs[1] in fused.last_use

    def add(context: StepContext, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(linear(x)) if overwrites else residual + linear(x)

    if apply_add is None or not overwrites:
        return Lowered(add, f"{packed.label}, in-place add" if overwrites else f"{packed.label}, add")
    return Lowered(lambda context, x, residual: apply_add(x, residual), f"{packed.label}, add in the linear")
