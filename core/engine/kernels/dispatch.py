"""Which lowering an op takes: by the kernels asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from engine.contracts.model import RopeFacts
from engine.contracts.ops import (
    Attention,
    LayerOp,
    LMHead,
    NormGateUpAct,
    NormQKVRopeWrite,
)
from engine.contracts.quantizer import PackedLinear
from engine.kernels.model import LoweredOp
from engine.kernels.settings import LoweredHead, Lowering
from engine.kernels.torch import chain


def lower_layer_op(
    lowering: Lowering, op: LayerOp, layer: int, norms: dict[str, Tensor], packed: PackedLinear | None
) -> LoweredOp:
    """One op of one layer. ``norms``: float32 weights by checkpoint name; ``packed``: its linear, if it has one."""
    kernels = _kernels(lowering)
    if isinstance(op, Attention):
        attention: LoweredOp = (kernels if lowering.native else chain).lower_attention(lowering, op, layer)
        return attention
    assert packed is not None, f"{type(op).__name__} has a linear"
    if isinstance(op, NormQKVRopeWrite):
        lowered: LoweredOp = kernels.lower_qkv(lowering, op, layer, norms, packed)
        return lowered
    if isinstance(op, NormGateUpAct):
        lowered = kernels.lower_gate_up(lowering, op, norms, packed)
        return lowered
    if lowering.kernels == "triton":
        from engine.kernels.triton import lowered as triton

        return triton.lower_residual(lowering, op, packed)
    residual: LoweredOp = kernels.lower_residual(lowering, packed)
    return residual


def lower_head(lowering: Lowering, op: LMHead, norm_weight: Tensor, head: PackedLinear) -> LoweredHead:
    """The final norm and the vocabulary projection."""
    if lowering.kernels == "triton":
        from engine.kernels.triton import lowered as triton

        return triton.lower_head(lowering, op, norm_weight, head)
    return chain.lower_head(lowering, op, norm_weight, head)


def _kernels(lowering: Lowering) -> Any:
    """The module that lowers what has a linear layer. Triton and the C++ functions are imported if they are used."""
    if lowering.kernels == "triton":
        from engine.kernels.triton import lowered as triton

        return triton
    if lowering.kernels == "native":
        from engine.kernels.cpu import native

        return native
    return chain


def rope_kinds(layers: Iterable[Sequence[LayerOp]]) -> tuple[RopeFacts, ...]:
    """The distinct rotations of some layers, in order of appearance."""
    found: list[RopeFacts] = []
    for layer in layers:
        for op in layer:
            if isinstance(op, NormQKVRopeWrite) and op.rope is not None and op.rope not in found:
                found.append(op.rope)
    return tuple(found)
