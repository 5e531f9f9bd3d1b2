"""Which tensors of a checkpoint a model reads, and whether a checkpoint has them: decided from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.border.calls import broken, shown
from engine.checkpoint.tensors import Checkpoint, CheckpointError, name_list
from engine.contracts.ops import (
    Attention,
    DownResidual,
    LayerOp,
    LinearPart,
    LinearSpec,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.contracts.quantizer import (
    CheckingQuantizer,
    KVScaleNames,
    KVScaleReader,
    Quantizer,
    StoredHeader,
    StoredTensor,
)

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors old checkpoints hidden_states although they follow from the configuration."""


def check_readable(checkpoint: Checkpoint, ops: ModelOps, quantizer: Quantizer, path: str) -> None:
    """Raise :class:`CheckpointError` with everything that headers show the quantizer cannot read."""
    if not isinstance(quantizer, CheckingQuantizer):
        return
    entries = ((name, checkpoint.entry(name)) for name in checkpoint.names)
    headers = {name: StoredHeader(str(entry.dtype).removeprefix("torch."), entry.shape) for name, entry in entries}
    problems = quantizer.problems(list(_read_specs(ops)), headers)
    if isinstance(problems, str) or not all(isinstance(problem, str) for problem in problems):
        raise broken(quantizer, "problems", f"returned {shown(problems)}, expected a list of texts")
    if problems:
        raise CheckpointError("\n  ".join((f"model.path={path}: the checkpoint cannot be read:", *problems)))


def check_names(checkpoint: Checkpoint, ops: ModelOps, quantizer: Quantizer, path: str) -> None:
    """Every tensor the ops need is there, and none is left over: a leftover is a weight we would silently drop."""
    required, optional = _expected_names(ops, quantizer)
    missing = required - checkpoint.names
    if missing:
        raise CheckpointError(f"model.path={path}: tensors missing from the checkpoint: {name_list(missing)}")
    leftover = {name for name in checkpoint.names - required - optional if not name.endswith(IGNORED_SUFFIXES)}
    if leftover:
        raise CheckpointError(
            f"model.path={path}: the checkpoint has tensors this architecture does not use: {name_list(leftover)}"
        )


def linear_of(op: LayerOp) -> LinearSpec | None:
    """The linear layer of an op."""
    if isinstance(op, NormQKVRopeWrite):
        return op.qkv
    if isinstance(op, OutResidual):
        return op.out
    if isinstance(op, NormGateUpAct):
        return op.gate_up
    if isinstance(op, DownResidual):
        return op.down
    assert isinstance(op, Attention)
    return None


def linear_names(spec: LinearSpec, quantizer: Quantizer) -> tuple[set[str], set[str]]:
    """The tensors a linear layer must have, and those it may have."""
    required: set[str] = set()
    optional: set[str] = set()
    for stored in stored_of(quantizer, spec):
        for part in spec.parts:
            if is_stored(stored, part):
                is_required = part.bias if stored.suffix == "bias" else not stored.optional
                (required if is_required else optional).add(f"{part.name}.{stored.suffix}")
    return required, optional


def stored_of(quantizer: Quantizer, spec: LinearSpec) -> Sequence[StoredTensor]:
    """What a quantizer says each part of a layer has in the checkpoint."""
    found = quantizer.stored(spec)
    if not isinstance(found, tuple | list) or not all(isinstance(each, StoredTensor) for each in found):
        raise broken(quantizer, "stored", f"returned {shown(found)}, expected a list of StoredTensor")
    return found


def is_stored(stored: StoredTensor, part: LinearPart) -> bool:
    """Whether this part has such a tensor: a bias only where the architecture says so, or the format allows it."""
    return stored.suffix != "bias" or part.bias or stored.extra


def plain_shape(part: LinearPart, spec: LinearSpec, stored: StoredTensor) -> tuple[int, ...] | None:
    """The shape an unquantized tensor must have; quantizers judge their own."""
    if stored.suffix == "bias":
        return (part.out_features,)
    is_plain = stored.suffix == "weight" and stored.quantum == 1
    return (part.out_features, spec.in_features) if is_plain else None


def kv_scale_names(quantizer: Quantizer, op: NormQKVRopeWrite) -> KVScaleNames:
    """Where the checkpoint may have scales for the cache of this layer."""
    if not isinstance(quantizer, KVScaleReader):
        return KVScaleNames()
    found = quantizer.kv_scale_names(op.qkv)
    if not isinstance(found, KVScaleNames):
        raise broken(quantizer, "kv_scale_names", f"returned {shown(found)}, expected KVScaleNames")
    return found


def _expected_names(ops: ModelOps, quantizer: Quantizer) -> tuple[set[str], set[str]]:
    required = {f"{ops.embed.name}.weight", f"{ops.head.norm.name}.weight"}
    optional: set[str] = set()
    for layer in ops.layers:
        required |= {f"{norm.name}.weight" for op in layer for norm, _ in op_norms(op)}
    if ops.head.tied:
        # Some checkpoints store the tied weight twice.
        optional |= {f"{part.name}.weight" for part in ops.head.head.parts}
    for spec in _read_specs(ops):
        of_linear = linear_names(spec, quantizer)
        required |= of_linear[0]
        optional |= of_linear[1]
    for layer in ops.layers:
        for op in layer:
            if isinstance(op, NormQKVRopeWrite):
                optional |= set(kv_scale_names(quantizer, op).all)
    return required, optional


def _read_specs(ops: ModelOps) -> Iterator[LinearSpec]:
    """Every linear layer that is read from the checkpoint: a tied head is the embedding."""
    for layer in ops.layers:
        yield from (spec for op in layer if (spec := linear_of(op)) is not None)
    if not ops.head.tied:
        yield ops.head.head


def op_norms(op: LayerOp) -> tuple[tuple[NormSpec, int], ...]:
    """The norms of a layer op, and the size of their weights."""
    if isinstance(op, NormQKVRopeWrite):
        heads = tuple((norm, op.head_dim) for norm in (op.q_norm, op.k_norm) if norm is not None)
        return heads if op.norm is None else ((op.norm, op.qkv.in_features), *heads)
    return ((op.norm, op.gate_up.in_features),) if isinstance(op, NormGateUpAct) else ()
