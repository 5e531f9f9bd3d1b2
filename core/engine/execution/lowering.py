"""From typed ops to callables: the fastest kernels this device has, or the chain of reference ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import RopeFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    Embed,
    LayerOp,
    LMHead,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import PackedLinear
from engine.execution.cpu_ops import HeadNorm, RotateAndWrite, compiled_gate, compiled_norm
from engine.execution.model import LoweredOp, StepContext
from engine.execution.norms import Norm, cpu_norm, gpu_norm, rms_norm
from engine.execution.reference import gated_activation, soft_capped
from engine.execution.rope import Rotary, paired, rotate, rotate_paired

Execution = Literal["reference", "eager", "compile"]
Linear = Callable[[Tensor], Tensor]
Rotations = Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]


@dataclass(frozen=True, slots=True)
class Lowering:
    """Where and how a model is lowered."""

    device: str
    dtype: torch.dtype
    attention: AttentionKernel
    kv_format: KVFormat
    parallelism: Parallelism
    rope_kinds: tuple[RopeFacts, ...]
    """The distinct rotations of the model; their order is that of ``StepContext.rotations``."""
    execution: Execution = "eager"
    """``eager``: torch ops; ``compile``: C++ kernels built on this machine (CPU, float32 and bfloat16); ``reference``:
    the plainest chain of torch ops, for tests and for judging a fast path."""

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def fused(self) -> bool:
        return self.execution != "reference"

    @property
    def compiled(self) -> bool:
        return self.execution == "compile"

    @property
    def stores_kv_as_is(self) -> bool:
        """Whether the cache stores keys and values as they are."""
        name = self.dtype_name
        return self.kv_format.scale == "none" and self.kv_format.storage_dtype(name) == name

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def tp(self) -> int:
        return self.parallelism.world_size

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """``weight``: float32."""
        if not self.fused:
            return lambda x: rms_norm(x, weight, eps)
        if self.compiled:
            return compiled_norm(weight, eps, self.dtype)
        return cpu_norm(weight, eps) if self.on_cpu else gpu_norm(weight, eps, self.dtype)

    def linear(self, packed: PackedLinear) -> Linear:
        return packed.apply if self.fused else packed.reference

    def reduced(self, linear: Linear) -> Linear:
        """A linear cut along its input: each rank holds a partial sum."""
        if self.tp == 1:
            return linear
        return lambda x: self.parallelism.all_reduce(linear(x), "tp")


def rope_kinds(ops: ModelOps) -> tuple[RopeFacts, ...]:
    """The distinct rotations of a model, in order of appearance."""
    found: list[RopeFacts] = []
    for layer in ops.layers:
        for op in layer:
            if isinstance(op, NormQKVRopeWrite) and op.rope is not None and op.rope not in found:
                found.append(op.rope)
    return tuple(found)


def lower_rotations(lowering: Lowering, head_dim: int, max_position: int) -> Rotations:
    """Tables of every distinct rotation, once per step."""
    rotaries = [Rotary(facts, head_dim, max_position, lowering.device) for facts in lowering.rope_kinds]
    whole = [rotates_whole(lowering, facts, head_dim) for facts in lowering.rope_kinds]

    def tables(positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        result = []
        for rotary, fast in zip(rotaries, whole, strict=True):
            cos, sin = rotary.cos_sin(positions, lowering.dtype if fast else torch.float32)
            result.append(paired(cos, sin) if fast else (cos, sin))
        return tuple(result)

    return tables


def rotates_whole(lowering: Lowering, facts: RopeFacts, head_dim: int) -> bool:
    """Whether torch's fast rotation applies."""
    return lowering.execution == "eager" and facts.rotary_dim in (None, head_dim)


def lower_embed(lowering: Lowering, op: Embed, table: Tensor) -> Callable[[Tensor], Tensor]:
    """``table``: ``[vocab, hidden_size]`` in the compute dtype."""
    if op.scale == 1.0:
        return lambda token_ids: F.embedding(token_ids, table)
    return lambda token_ids: F.embedding(token_ids, table).mul_(op.scale)


def lower_head(lowering: Lowering, op: LMHead, norm_weight: Tensor, head: PackedLinear) -> Callable[[Tensor], Tensor]:
    norm, linear = lowering.norm(norm_weight, op.norm.eps), lowering.linear(head)

    def project(hidden: Tensor) -> Tensor:
        logits = linear(norm(hidden))
        if lowering.tp > 1:
            logits = lowering.parallelism.all_gather(logits, "tp", axis=-1)
        return soft_capped(logits.float(), op.soft_cap)

    return project


def lower_layer_op(
    lowering: Lowering, op: LayerOp, layer: int, norms: dict[str, Tensor], packed: PackedLinear | None
) -> LoweredOp:
    """One op of one layer. ``norms``: float32 weights by checkpoint name; ``packed``: its linear, if it has one."""
    if isinstance(op, Attention):
        return _lower_attention(lowering, op, layer)
    assert packed is not None, f"{type(op).__name__} has a linear"
    if isinstance(op, NormQKVRopeWrite):
        lower = _lower_qkv_compiled if lowering.compiled else _lower_qkv
        return lower(lowering, op, layer, norms, packed)
    if isinstance(op, NormGateUpAct):
        return _lower_gate_up(lowering, op, norms, packed)
    return _lower_residual(lowering, packed)


def _lower_qkv(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    num_heads, num_kv_heads = op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp
    head_dim, rotated_heads = op.head_dim, num_heads + num_kv_heads
    rotated_size = rotated_heads * head_dim
    norm, linear = lowering.norm(norms[op.norm.name], op.norm.eps), lowering.linear(packed)
    head_norm = _head_norm(lowering, op, norms, num_heads, num_kv_heads)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    turn = rotate_paired if op.rope and rotates_whole(lowering, op.rope, head_dim) else rotate

    def qkv_rope_write(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        qkv = linear(norm(residual))
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


def _lower_qkv_compiled(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    num_heads, num_kv_heads, head_dim = op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp, op.head_dim
    norm, linear = lowering.norm(norms[op.norm.name], op.norm.eps), lowering.linear(packed)
    q_norm, k_norm = (None if spec is None else HeadNorm(norms[spec.name], spec.eps) for spec in (op.q_norm, op.k_norm))
    rotary_dim = 0 if op.rope is None else op.rope.rotary_dim or head_dim
    rotate_and_write = RotateAndWrite(num_heads, num_kv_heads, head_dim, rotary_dim, q_norm, k_norm, lowering.dtype)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    writes = lowering.stores_kv_as_is

    def qkv_rope_write(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        qkv = linear(norm(residual))
        tables = None if rotation is None else context.rotations[rotation]
        keys, values = context.kv.layer(layer)[:2] if writes else (None, None)
        rotate_and_write(qkv, tables, context.slot_mapping, keys, values)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        if not writes:
            k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
            context.kv.write(layer, context.slot_mapping, k, v)
        return residual, heads[:, :num_heads]

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


def _lower_attention(lowering: Lowering, op: Attention, layer: int) -> LoweredOp:
    record, kv_format = lowering.attention.record, lowering.kv_format
    local = op if lowering.tp == 1 else _local_attention(op, lowering.tp)

    def attention(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        keys, values, key_scale, value_scale = context.kv.layer(layer)
        out = record(context.staged, local, carry, keys, values, kv_format, key_scale, value_scale)
        return residual, out

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


def _lower_gate_up(lowering: Lowering, op: NormGateUpAct, norms: dict[str, Tensor], packed: PackedLinear) -> LoweredOp:
    norm, linear, act = lowering.norm(norms[op.norm.name], op.norm.eps), lowering.linear(packed), op.act
    apply_gated = packed.apply_gated if lowering.compiled else None
    if apply_gated is not None:
        return lambda residual, carry, context: (residual, apply_gated(norm(residual), act))
    if lowering.compiled:
        gate = compiled_gate(act, lowering.dtype)
        return lambda residual, carry, context: (residual, gate(linear(norm(residual))))

    def gate_up(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        return residual, gated_activation(linear(norm(residual)), act)

    return gate_up


def _lower_residual(lowering: Lowering, packed: PackedLinear) -> LoweredOp:
    linear = lowering.reduced(lowering.linear(packed))
    fused = packed.apply_add if lowering.fused and lowering.tp == 1 else None

    def fused_add(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        assert fused is not None
        return fused(carry, residual), carry

    def add_to_residual(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        return residual.add_(linear(carry)), carry

    return add_to_residual if fused is None else fused_add


def op_norms(op: LayerOp) -> tuple[tuple[NormSpec, int], ...]:
    """The norms of a layer op, and the size of their weights."""
    if isinstance(op, NormQKVRopeWrite):
        heads = tuple((norm, op.head_dim) for norm in (op.q_norm, op.k_norm) if norm is not None)
        return ((op.norm, op.qkv.in_features), *heads)
    return ((op.norm, op.gate_up.in_features),) if isinstance(op, NormGateUpAct) else ()


def describe(lowering: Lowering, ops: ModelOps, linears: dict[str, PackedLinear]) -> tuple[str, ...]:
    """One line for each kind of op. ``linears``: one of its linears, by the op's name."""
    norm = _norm_label(lowering)
    labels = {name: packed.label for name, packed in linears.items()}
    gate, add = _gate_label(lowering, linears.get("NormGateUpAct")), _add_label(lowering, linears.get("OutResidual"))
    kinds = {
        NormQKVRopeWrite.__name__: f"{norm}, {labels.get('NormQKVRopeWrite', '')}, {_rope_label(lowering, ops)}",
        Attention.__name__: _attention_label(lowering, ops),
        OutResidual.__name__: f"{labels.get('OutResidual', '')}, {add}",
        NormGateUpAct.__name__: f"{norm}, {labels.get('NormGateUpAct', '')}, {gate}",
        DownResidual.__name__: f"{labels.get('DownResidual', '')}, {add}",
    }
    used = {type(op).__name__ for layer in ops.layers for op in layer}
    lines = [f"{name}: {text}" for name, text in kinds.items() if name in used]
    return ("Embed: embedding", *lines, f"LMHead: {norm}, {labels.get('LMHead', '')}")


def _norm_label(lowering: Lowering) -> str:
    if lowering.compiled:
        return "compiled RMSNorm"
    if not lowering.fused:
        return "reference norm"
    return "vector-norm RMSNorm" if lowering.on_cpu else "torch RMSNorm"


def _rope_label(lowering: Lowering, ops: ModelOps) -> str:
    if lowering.compiled:
        return "compiled rotation" + (" and KV write" if lowering.stores_kv_as_is else ", index_copy KV write")
    whole = all(rotates_whole(lowering, facts, _head_dim(ops)) for facts in lowering.rope_kinds)
    return ("paired" if whole else "reference") + " rotation, index_copy KV write"


def _attention_label(lowering: Lowering, ops: ModelOps) -> str:
    attentions = (op for layer in ops.layers for op in layer if isinstance(op, Attention))
    labels = (lowering.attention.label(op, lowering.dtype_name, lowering.kv_format) for op in attentions)
    return ", ".join(dict.fromkeys(labels))


def _gate_label(lowering: Lowering, packed: PackedLinear | None) -> str:
    if not lowering.compiled:
        return "in-place gate"
    return "compiled gate" if packed is None or packed.apply_gated is None else "gate in the linear"


def _add_label(lowering: Lowering, packed: PackedLinear | None) -> str:
    fused = lowering.fused and lowering.tp == 1 and packed is not None and packed.apply_add is not None
    return "add in the linear" if fused else "in-place add"


def _head_dim(ops: ModelOps) -> int:
    dims = {op.head_dim for layer in ops.layers for op in layer if isinstance(op, NormQKVRopeWrite)}
    return max(dims, default=0)
