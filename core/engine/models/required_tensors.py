"""Which tensors of a checkpoint a graph reads, and whether a checkpoint has them: decided from headers alone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import name_list
from engine.contracts.graph import Block, Graph
from engine.contracts.ops import (
    Experts,
    KVWrite,
    Linear,
    LinearSpec,
)
from engine.contracts.quantizer import CheckingQuantizer, KVScaleNames, KVScaleReader, Quantizer, StoredHeader
from engine.models.fused_experts import fused_names, fused_problems, fused_tensors, is_fused, misread
from engine.models.stored import linear_names, plain_shape, quantizer_problems, stored_of
from engine.plugin_guard.calls import contract_error, quote

if TYPE_CHECKING:
    from engine.checkpoint.tensors import Checkpoint, TensorEntry

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that old checkpoints have although they follow from the configuration."""


def checked_checkpoint(graph: Graph, quantizer: Quantizer, path: str) -> Checkpoint:
    """The checkpoint at ``path``. Raises :class:`CheckpointError` for one that is damaged or not the model's, as far as
    headers tell: before any tensor is read."""
    from engine.checkpoint.tensors import open_checkpoint  # imports torch

    checkpoint = open_checkpoint(path)
    check_readable(checkpoint, graph, quantizer, path)
    check_names(checkpoint, graph, quantizer, path)
    check_shapes(checkpoint, graph, quantizer)
    return checkpoint


def check_readable(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer, path: str) -> None:
    """Raise :class:`CheckpointError` with everything that headers show the quantizer cannot read."""
    if not isinstance(quantizer, CheckingQuantizer):
        return
    entries = ((name, checkpoint.entry(name)) for name in checkpoint.names)
    headers = {name: StoredHeader(str(entry.dtype).removeprefix("torch."), entry.shape) for name, entry in entries}
    specs = [*linears(graph, checkpoint.names, quantizer), *head_projections(graph)]
    problems = [*quantizer_problems(quantizer, specs, headers)]
    for node in graph.nodes:
        if isinstance(node.op, Experts):
            problems += misread(node.op, checkpoint.names, quantizer)
            if is_fused(node.op, checkpoint.names, quantizer):
                problems += fused_problems(node.op, headers, quantizer)
    if problems:
        raise CheckpointError("\n  ".join((f"model.path={path}: the checkpoint cannot be read:", *problems)))


def check_names(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer, path: str) -> None:
    """Every tensor that the graph needs is there, and none is left over: a leftover is a weight we would silently
    drop."""
    required, optional = expected_names(graph, quantizer, checkpoint.names)
    missing = (required | optional & checkpoint.lost) - checkpoint.names
    if missing:
        raise CheckpointError(f"model.path={path}: tensors missing from the checkpoint: {name_list(missing)}")
    known = required | optional | unread_names(graph, checkpoint.names)
    leftover = {name for name in checkpoint.names - known if not name.endswith(IGNORED_SUFFIXES)}
    if leftover:
        raise CheckpointError(
            f"model.path={path}: the checkpoint has tensors this architecture does not use: {name_list(leftover)}"
        )


def check_shapes(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer) -> None:
    """What the graph alone says of shapes is so; a quantizer judges its own tensors. Raises :class:`CheckpointError`
    for the first that is not."""
    for name, shape in _shapes(graph, quantizer, checkpoint.names):
        if name in checkpoint.names:
            check_shape(checkpoint.entry(name), name, shape)


def check_shape(entry: TensorEntry, name: str, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model expects {list(shape)}"
        )


def _shapes(graph: Graph, quantizer: Quantizer, names: Container[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from small_tensors(graph)
    for node in graph.nodes:
        if isinstance(node.op, Experts) and is_fused(node.op, names):
            yield from fused_tensors(node.op)
    for spec in (*linears(graph, names, quantizer), *head_projections(graph)):
        for stored in stored_of(quantizer, spec):
            for part in spec.parts:
                shape = plain_shape(part, spec, stored)
                if shape is not None:
                    yield f"{part.name}.{stored.suffix}", shape


def unread_names(graph: Graph, names: Iterable[str]) -> set[str]:
    """Those that belong to parts of the checkpoint that the model does not read."""
    return {name for name in names if name.startswith(graph.ignored)}


def unread_bytes(graph: Graph, checkpoint: Checkpoint) -> int:
    """Of :func:`unread_names`."""
    return sum(checkpoint.entry(name).num_bytes for name in unread_names(graph, checkpoint.names))


def checkpoint_notes(graph: Graph, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the user should know of how a checkpoint is read."""
    return tuple(note for note in (checkpoint.note, _unread_note(graph, checkpoint)) if note)


def _unread_note(graph: Graph, checkpoint: Checkpoint) -> str:
    """What is not read; empty if everything is."""
    unread = unread_names(graph, checkpoint.names)
    if not unread:
        return ""
    parts = ", ".join(f"{prefix}*" for prefix in graph.ignored if any(name.startswith(prefix) for name in unread))
    size = unread_bytes(graph, checkpoint) / 1e9
    return f"{len(unread)} tensors of the checkpoint ({size:.1f} GB) are not read: {parts}"


def expected_names(graph: Graph, quantizer: Quantizer, names: Container[str]) -> tuple[set[str], set[str]]:
    """The tensors that a checkpoint must have, and those that it may have. ``names``: those that it has."""
    required = {name for name, _ in small_tensors(graph)}
    optional: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.op, Experts) and is_fused(node.op, names, quantizer):
            of_experts = fused_names(node.op, quantizer)
            required |= of_experts[0]
            optional |= of_experts[1]
    for spec in (*linears(graph, names, quantizer), *head_projections(graph)):
        of_linear = linear_names(spec, quantizer)
        required |= of_linear[0]
        optional |= of_linear[1]
    for layer in graph.layers:
        for node in layer.nodes:
            if isinstance(node.op, KVWrite):
                optional |= set(kv_scale_names(quantizer, projection(layer, node.inputs[0])).all)
    return required, optional


def linears(graph: Graph, names: Container[str] = (), quantizer: Quantizer | None = None) -> Iterator[LinearSpec]:
    """Every linear layer that is read from the checkpoint: a tied head is the embedding, and experts that are stored
    together (``names``: what the checkpoint has) are no layers of their own."""
    for node in graph.nodes:
        tied = isinstance(node.op, Linear) and node.op.tied
        if not tied and not (isinstance(node.op, Experts) and is_fused(node.op, names, quantizer)):
            yield from node.op.linears


def small_tensors(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors beside those of linear layers."""
    for node in graph.nodes:
        yield from node.op.reads(node)


def head_projections(graph: Graph) -> list[LinearSpec]:
    """Projections of each head by itself; several ops may read different rows of one."""
    return list(dict.fromkeys(spec for node in graph.nodes for spec in node.op.projections))


def projection(block: Block, value: int) -> LinearSpec | None:
    """The linear layer in this block that a value comes from, through whatever lies between."""
    for node in reversed(block.nodes):
        if value in node.outputs:
            if isinstance(node.op, Linear):
                return node.op.spec
            return projection(block, node.inputs[node.outputs.index(value)])
    return None


def kv_scale_names(quantizer: Quantizer, qkv: LinearSpec | None) -> KVScaleNames:
    """Where the checkpoint may have scales for a layer's cache; ``qkv``: what its keys come from."""
    if qkv is None or not isinstance(quantizer, KVScaleReader):
        return KVScaleNames()
    found = quantizer.kv_scale_names(qkv)
    if not isinstance(found, KVScaleNames):
        raise contract_error(quantizer, "kv_scale_names", f"returned {quote(found)}, expected KVScaleNames")
    return found
