"""An architecture's description of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.border.calls import broken
from engine.border.values import problems
from engine.contracts.architecture import Architecture
from engine.contracts.model import ModelFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    LayerOp,
    LinearSpec,
    LMHead,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    OutResidual,
)


def described(architecture: Architecture, model: ModelFacts) -> ModelOps:
    """The model's ops. Raises :class:`~engine.border.calls.PluginError` where they do not fit each other or the facts:
    kernels take sizes from both."""
    ops = architecture.describe(model)
    wrong = next(problems(ops, ModelOps, "ops"), "") or next(_misfits(ops, model), "")
    if wrong:
        raise broken(architecture, "describe", f"returned ops that do not fit: {wrong}")
    return ops


def _misfits(ops: ModelOps, model: ModelFacts) -> Iterator[str]:
    if len(ops.layers) != model.num_layers:
        yield f"{len(ops.layers)} layers, expected {model.num_layers}"
    table, expected = (ops.embed.vocab_size, ops.embed.hidden_size), (model.vocab_size, model.hidden_size)
    if table != expected:
        yield f"embed {list(table)}, expected {list(expected)}"
    for index, layer in enumerate(ops.layers):
        for found in _layer_misfits(layer, model):
            yield f"layers[{index}]: {found}"
    yield from _head_misfits(ops.head, model)


def _layer_misfits(layer: Sequence[LayerOp], model: ModelFacts) -> Iterator[str]:
    attended = gated = None
    for op in layer:
        if isinstance(op, NormQKVRopeWrite | Attention):
            shape, expected = (op.num_kv_heads, op.head_dim), (model.num_kv_heads, model.head_dim)
            if shape != expected or op.num_heads % max(op.num_kv_heads, 1):
                yield (
                    f"{type(op).__name__} with {op.num_heads} heads, and KV heads x head_dim {list(shape)}, "
                    f"expected {list(expected)}"
                )
            attended = op.num_heads * op.head_dim
        if isinstance(op, NormQKVRopeWrite):
            both = 2 * op.num_kv_heads * op.head_dim
            yield from _size("qkv", op.qkv, model.hidden_size, op.num_heads * op.head_dim + both)
        elif isinstance(op, OutResidual):
            yield from _size("out", op.out, attended, model.hidden_size)
        elif isinstance(op, NormGateUpAct):
            sizes = [part.out_features for part in op.gate_up.parts]
            if op.gate_up.kind != "gate_up" or len(sizes) != 2 or sizes[0] != sizes[1]:
                yield f"gate_up of kind {op.gate_up.kind} with parts {sizes}, expected kind gate_up and two equal parts"
            yield from _size("gate_up", op.gate_up, model.hidden_size, None)
            gated = op.gate_up.out_features // 2
        elif isinstance(op, DownResidual):
            yield from _size("down", op.down, gated, model.hidden_size)


def _head_misfits(head: LMHead, model: ModelFacts) -> Iterator[str]:
    yield from _size("head", head.head, model.hidden_size, model.vocab_size)


def _size(name: str, spec: LinearSpec, in_features: int | None, out_features: int | None) -> Iterator[str]:
    """``None``: any size."""
    if not spec.parts or any(part.out_features < 1 for part in spec.parts):
        yield f"{name} with parts {[part.out_features for part in spec.parts]}"
    if in_features is not None and spec.in_features != in_features:
        yield f"{name} takes {spec.in_features} features, expected {in_features}"
    if out_features is not None and spec.out_features != out_features:
        yield f"{name} has {spec.out_features} outputs, expected {out_features}"
