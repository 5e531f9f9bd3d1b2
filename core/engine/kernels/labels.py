"""What runs for each kind of op, in words, for the plan."""

from __future__ import annotations

from collections.abc import Mapping

from engine.contracts.ops import (
    Attention,
    DownResidual,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    OutResidual,
)
from engine.contracts.quantizer import PackedLinear
from engine.kernels.settings import MOST_TOKENS, Lowering
from engine.kernels.torch.chain import rotates_whole


def describe(lowering: Lowering, ops: ModelOps, linears: dict[str, PackedLinear]) -> tuple[str, ...]:
    """One line for each kind of op, and with C++ kernels one for whole steps. ``linears``: one of its linears, by the
    op's name."""
    kinds = _chains(lowering, ops, linears)
    if lowering.kernels == "triton":
        fused = _fused(lowering, ops)
        kinds = {name: _by_rows(fused.get(name), text, linears.get(name)) for name, text in kinds.items()}
    used = {type(op).__name__ for layer in ops.layers for op in layer} | {"LMHead"}
    lines = ("Embed: embedding", *(f"{name}: {text}" for name, text in kinds.items() if name in used))
    return (*lines, _steps_label(lowering, linears)) if lowering.native else lines


def _chains(lowering: Lowering, ops: ModelOps, linears: dict[str, PackedLinear]) -> dict[str, str]:
    norm = _norm_label(lowering)
    labels = {name: packed.label for name, packed in linears.items()}
    gate = _gate_label(lowering, linears.get("NormGateUpAct"))
    return {
        NormQKVRopeWrite.__name__: f"{norm}, {labels.get('NormQKVRopeWrite', '')}, {_rope_label(lowering, ops)}",
        Attention.__name__: _attention_label(lowering, ops),
        OutResidual.__name__: f"{labels.get('OutResidual', '')}, {_add_label(lowering, linears.get('OutResidual'))}",
        NormGateUpAct.__name__: f"{norm}, {labels.get('NormGateUpAct', '')}, {gate}",
        DownResidual.__name__: f"{labels.get('DownResidual', '')}, {_add_label(lowering, linears.get('DownResidual'))}",
        "LMHead": f"{norm}, {labels.get('LMHead', '')}",
    }


def _fused(lowering: Lowering, ops: ModelOps) -> dict[str, str]:
    """What the Triton kernels for few rows are, by op; an op that has none is missing."""
    from engine.kernels.triton import lowered as triton  # Triton is imported by those who lower to it only

    add = "one Triton kernel: product, add" if lowering.tp == 1 else "Triton product, all-reduce, in-place add"
    lines = {
        OutResidual.__name__: add,
        NormGateUpAct.__name__: "one Triton kernel: norm, product, gate",
        DownResidual.__name__: add,
        "LMHead": "one Triton kernel: norm, product",
    }
    qkv = [op for layer in ops.layers for op in layer if isinstance(op, NormQKVRopeWrite)]
    if all(triton.writes_inline(lowering, op) for op in qkv):
        in_two = any(triton.needs_whole_heads(lowering, op) for op in qkv)
        lines[NormQKVRopeWrite.__name__] = (
            "two Triton kernels: norm, product; whole heads, rotation, KV write"
            if in_two
            else "one Triton kernel: norm, product, rotation, KV write"
        )
    return lines


def _by_rows(fused: str | None, chain: str, packed: PackedLinear | None) -> str:
    from engine.kernels.triton.lowered import served_rows

    if packed is None:  # attention
        return chain
    rows = served_rows(packed)
    if fused is None:
        return f"unfused (no inline store of this kv_format): {chain}"
    if rows is None:
        why = "no tile loader" if packed.tile_loader is None else f"for {packed.good_m[0]} rows and more"
        return f"unfused (weights: {why}): {chain}"
    return f"{rows[0]} to {rows[1]} rows: {fused}; else: {chain}"


def _steps_label(lowering: Lowering, linears: Mapping[str, PackedLinear]) -> str:
    reason = lowering.why_uncaptured
    if reason is not None:
        return f"Steps: run uncaptured (slower): {reason}"
    layers = (packed for name, packed in linears.items() if name != "LMHead")
    without = next((packed.label for packed in layers if packed.native is None), None)
    if without is not None:
        return f"Steps: run uncaptured (slower): linear layers ({without}) have no native calls"
    return f"Steps: up to {MOST_TOKENS} tokens are one call for all layers; else op by op"


def _norm_label(lowering: Lowering) -> str:
    if lowering.native:
        return "compiled RMSNorm"
    if not lowering.fused:
        return "reference norm"
    return "vector-norm RMSNorm" if lowering.on_cpu else "torch RMSNorm"


def _rope_label(lowering: Lowering, ops: ModelOps) -> str:
    if lowering.native:
        return "compiled rotation" + (" and KV write" if lowering.stores_kv_as_is else ", index_copy KV write")
    if lowering.kernels == "triton":
        from engine.kernels.triton.lowered import writes_inline

        qkv = [op for layer in ops.layers for op in layer if isinstance(op, NormQKVRopeWrite)]
        if all(writes_inline(lowering, op) for op in qkv):
            return "Triton rotation and KV write"
    whole = all(rotates_whole(lowering, facts, _head_dim(ops)) for facts in lowering.rope_kinds)
    return ("paired" if whole else "reference") + " rotation, index_copy KV write"


def _attention_label(lowering: Lowering, ops: ModelOps) -> str:
    attentions = (op for layer in ops.layers for op in layer if isinstance(op, Attention))
    labels = (lowering.attention.label(op, lowering.dtype_name, lowering.kv_format) for op in attentions)
    return ", ".join(dict.fromkeys(labels))


def _gate_label(lowering: Lowering, packed: PackedLinear | None) -> str:
    if lowering.kernels == "triton":
        return "Triton gate"
    if not lowering.native:
        return "in-place gate"
    return "compiled gate" if packed is None or packed.apply_gated is None else "gate in the linear"


def _add_label(lowering: Lowering, packed: PackedLinear | None) -> str:
    fused = lowering.fused and lowering.tp == 1 and packed is not None and packed.apply_add is not None
    return "add in the linear" if fused else "in-place add"


def _head_dim(ops: ModelOps) -> int:
    dims = {op.head_dim for layer in ops.layers for op in layer if isinstance(op, NormQKVRopeWrite)}
    return max(dims, default=0)
