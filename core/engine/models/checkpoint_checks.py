"""Whether a checkpoint has what a graph reads: decided from headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import name_list
from engine.contracts.graph import Graph
from engine.contracts.ops import Experts
from engine.contracts.quantizer import CheckingQuantizer, Quantizer, StoredHeader
from engine.models.fused_experts import fused_problems, misread
from engine.models.manifest import Manifest, unread_names
from engine.models.stored import quantizer_problems

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
    manifest = Manifest(quantizer, checkpoint.names)
    problems = [*quantizer_problems(quantizer, manifest.layers(graph), headers)]
    for node in graph.nodes:
        if isinstance(node.op, Experts):
            problems += misread(node.op, checkpoint.names, quantizer)
            if manifest.are_together(node.op):
                problems += fused_problems(node.op, headers, quantizer)
    if problems:
        raise CheckpointError("\n  ".join((f"model.path={path}: the checkpoint cannot be read:", *problems)))


def check_names(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer, path: str) -> None:
    """Every tensor that the graph needs is there, and none is left over: a leftover is a weight we would silently
    drop."""
    required, optional = Manifest(quantizer, checkpoint.names).expected_names(graph)
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
    for tensor in Manifest(quantizer, checkpoint.names).tensors(graph):
        if tensor.shape is not None and tensor.name in checkpoint.names:
            check_shape(checkpoint.entry(tensor.name), tensor.name, tensor.shape)


def check_shape(entry: TensorEntry, name: str, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model expects {list(shape)}"
        )


def unread_bytes(graph: Graph, checkpoint: Checkpoint) -> int:
    """Of :func:`~engine.models.manifest.unread_names`."""
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
