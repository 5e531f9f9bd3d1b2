"""Ops on the Triton kernels: one launch each for few rows, torch's products and one kernel between them for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.model import RopeFacts
from engine.contracts.ops import (
    DownResidual,
    LinearSpec,
    LMHead,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.contracts.quantizer import PackedLinear
from engine.kernels.model import LoweredOp, StepContext
from engine.kernels.settings import LoweredHead, Lowering
from engine.kernels.torch import chain
from engine.kernels.triton.launch import (
    HeadShape,
    HeadWriter,
    Launch,
    NormWeight,
    SkinnyLinear,
    argmax_rows,
    gated_activation,
    quantized_rows,
)
from engine.kernels.triton.tiles import MAX_ROWS


@dataclass(frozen=True, slots=True)
class FewRows:
    """The fused kernel of an op and the numbers of rows it serves, ``rows[0]`` to ``rows[1]``."""

    linear: SkinnyLinear
    rows: tuple[int, int]

    def serves(self, x: Tensor) -> bool:
        return self.rows[0] <= x.shape[0] <= self.rows[1]


def served_rows(packed: PackedLinear) -> tuple[int, int] | None:
    """Numbers of rows for which a layer's fused kernel is used, first and last; ``None`` if it has none."""
    low, high = max(1, packed.good_m[0]), min(MAX_ROWS, packed.good_m[1])
    return None if packed.tile_loader is None or low > high else (low, high)


def writes_inline(lowering: Lowering, op: NormQKVRopeWrite) -> bool:
    """Whether kernels can store this cache format themselves."""
    return op.head_dim % 2 == 0 and (lowering.kv_format.scale == "none" or lowering.kv_format.store_tile() is not None)


def needs_whole_heads(lowering: Lowering, op: NormQKVRopeWrite) -> bool:
    """Whether something is computed over a head: its norm, or the scale it is stored with."""
    return op.q_norm is not None or op.k_norm is not None or lowering.kv_format.scale == "per_token_head"


def lower_qkv(
    lowering: Lowering, op: NormQKVRopeWrite, layer: int, norms: dict[str, Tensor], packed: PackedLinear
) -> LoweredOp:
    """See :class:`NormQKVRopeWrite`; a cache format that kernels cannot store takes the chain of torch ops, as does a
    layer that is handed its input normed."""
    if op.norm is None or not writes_inline(lowering, op):
        return chain.lower_qkv(lowering, op, layer, norms, packed)
    few = _few_rows(lowering, op.qkv, packed, _input_norm(lowering, op.norm, norms))
    normed_linear = _many_rows(lowering, op.norm, norms, packed)
    heads = HeadShape(op.num_heads // lowering.tp, op.num_kv_heads // lowering.tp, op.head_dim, _rotary_dim(op))
    q_norm, k_norm = (None if spec is None else _input_norm(lowering, spec, norms) for spec in (op.q_norm, op.k_norm))
    write = HeadWriter(Launch.on(lowering.device), heads, q_norm, k_norm)
    rotation = None if op.rope is None else lowering.rope_kinds.index(op.rope)
    in_two = needs_whole_heads(lowering, op)

    def qkv_rope_write(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        tables = None if rotation is None else context.rotations[rotation]
        slots, cache = context.slot_mapping, context.kv.layers[layer]
        if few is None or not few.serves(residual):
            return residual, write(normed_linear(residual), tables, slots, cache)
        if in_two:
            return residual, write(few.linear.store(residual), tables, slots, cache)
        return residual, few.linear.rope_write(residual, heads, tables, slots, cache)

    return qkv_rope_write


def lower_gate_up(lowering: Lowering, op: NormGateUpAct, norms: dict[str, Tensor], packed: PackedLinear) -> LoweredOp:
    """See :class:`NormGateUpAct`."""
    few, act = _few_rows(lowering, op.gate_up, packed, _input_norm(lowering, op.norm, norms)), op.act
    normed_linear = _many_rows(lowering, op.norm, norms, packed)
    launch = Launch.on(lowering.device)

    def gate_up(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        if few is not None and few.serves(residual):
            return residual, few.linear.gate(residual, act)
        return residual, gated_activation(normed_linear(residual), act, launch)

    return gate_up


def lower_residual(lowering: Lowering, op: OutResidual | DownResidual, packed: PackedLinear) -> LoweredOp:
    """See :class:`OutResidual`, :class:`DownResidual`."""
    few = _few_rows(lowering, op.out if isinstance(op, OutResidual) else op.down, packed, None)
    many = chain.lower_residual(lowering, packed)
    if few is None:
        return many
    partial = lowering.reduced(few.linear.store)

    def add_to_residual(residual: Tensor, hidden_states: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        if not few.serves(hidden_states):
            return many(residual, hidden_states, context)
        if lowering.tp > 1:
            return residual.add_(partial(hidden_states)), hidden_states
        return few.linear.add(hidden_states, residual), hidden_states

    return add_to_residual


def lower_head(lowering: Lowering, op: LMHead, norm_weight: Tensor, head: PackedLinear) -> LoweredHead:
    """See :class:`LMHead`; ``project_greedy`` finds the tokens in the kernel that has the logits."""
    norm, linear = lowering.norm(norm_weight, op.norm.eps), lowering.linear(head)
    few = _few_rows(lowering, op.head, head, _input_norm(lowering, op.norm, {op.norm.name: norm_weight}))
    launch = Launch.on(lowering.device)

    def local_logits(hidden: Tensor) -> Tensor:
        if few is not None and few.serves(hidden):
            return few.linear.logits(hidden)[0]
        return linear(norm(hidden)).float()

    def project(hidden: Tensor) -> Tensor:
        logits = local_logits(hidden)
        return logits if lowering.tp == 1 else lowering.parallelism.all_gather(logits, "tp", axis=-1)

    def project_greedy(hidden: Tensor) -> tuple[Tensor, Tensor]:
        if few is not None and lowering.tp == 1 and few.serves(hidden):
            logits, tokens = few.linear.logits(hidden, greedy=True)
            assert tokens is not None
            return logits, tokens
        logits = project(hidden).contiguous()
        return logits, argmax_rows(logits, launch)

    return LoweredHead(project, chain.lower_lm_head(lowering, head), project_greedy)


def _few_rows(lowering: Lowering, spec: LinearSpec, packed: PackedLinear, norm: NormWeight | None) -> FewRows | None:
    rows = served_rows(packed)
    if rows is None or packed.tile_loader is None:
        return None
    in_features = spec.in_features // (lowering.tp if spec.shard == "in" else 1)
    out_features = spec.out_features // (lowering.tp if spec.shard == "out" else 1)
    return FewRows(SkinnyLinear(Launch.on(lowering.device), packed.tile_loader, in_features, out_features, norm), rows)


def _many_rows(
    lowering: Lowering, spec: NormSpec, norms: dict[str, Tensor], packed: PackedLinear
) -> Callable[[Tensor], Tensor]:
    """Norm and product, for any number of rows; a layer that takes its input in 8 bits gets it so from the norm."""
    norm, linear = lowering.norm(norms[spec.name], spec.eps), lowering.linear(packed)
    kind, apply_quantized = packed.input_quant, packed.apply_quantized
    if kind is None or apply_quantized is None:
        return lambda x: linear(norm(x))
    weight, launch = _input_norm(lowering, spec, norms), Launch.on(lowering.device)

    def rounded(x: Tensor) -> Tensor:
        if x.shape[0] <= MAX_ROWS:
            return linear(norm(x))
        return apply_quantized(*quantized_rows(x, weight, kind, launch), x.dtype)

    return rounded


def _input_norm(lowering: Lowering, spec: NormSpec, norms: dict[str, Tensor]) -> NormWeight:
    weight = norms[spec.name]
    narrow = weight.to(lowering.dtype)
    # Every program reads all of it: half the bytes where they lose nothing, as with weights stored in 16 bits.
    return NormWeight(narrow if torch.equal(narrow.float(), weight) else weight, spec.eps)


def _rotary_dim(op: NormQKVRopeWrite) -> int:
    rope: RopeFacts | None = op.rope
    return 0 if rope is None else rope.rotary_dim or op.head_dim
