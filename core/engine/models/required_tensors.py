"""Which tensors of a checkpoint a graph reads, and whether a checkpoint has them: decided from headers alone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import name_list
from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import (
    Attention,
    DeltaRule,
    Embed,
    Experts,
    HeadLinear,
    KVWrite,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    Op,
    Route,
    Router,
    ScaleBy,
    Share,
    SharedAttention,
    ShortConv,
    TorchFunction,
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
            yield from linears_of(node.op)


def linears_of(op: Op) -> tuple[LinearSpec, ...]:
    """The linear layers of one op, in the order in which they are packed."""
    if isinstance(op, Linear):
        return (op.spec,)
    if isinstance(op, Experts):
        return tuple(spec for pair in expert_linears(op) for spec in pair)
    return ()


def expert_linears(op: Experts) -> list[tuple[LinearSpec, LinearSpec]]:
    """Gate and up, and down, of each expert that is here."""
    numbers = range(op.num_experts) if op.held is None else op.held.numbers
    return [(_numbered(op.gate_up, i), _numbered(op.down, i)) for i in numbers]


def _numbered(spec: LinearSpec, number: int) -> LinearSpec:
    parts = tuple(replace(part, name=part.name.replace("{}", str(number))) for part in spec.parts)
    share = spec.share and replace(spec.share, whole=_numbered(spec.share.whole, number))
    return replace(spec, parts=parts, share=share)


def norm_tensors(op: Norm) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a norm reads."""
    shape = (op.by_head, op.size) if op.by_head else (op.size,)
    shape = shape if op.heads is None else (op.heads.whole, op.size)
    if op.name is not None:
        yield f"{op.name}.weight", shape
        if op.bias:
            yield f"{op.name}.bias", shape


def small_tensors(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors beside those of linear layers."""
    for node in graph.nodes:
        yield from small_tensors_of(node)


def small_tensors_of(node: Node) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of one node."""
    if isinstance(node.op, Embed):
        yield f"{node.op.name}.weight", (node.op.vocab_size, node.op.size)
    elif isinstance(node.op, Norm):
        yield from norm_tensors(node.op)
    elif isinstance(node.op, Attention | SharedAttention) and node.sinks is not None:
        heads = node.op.num_heads if isinstance(node.op, Attention) else node.op.attention.num_heads
        yield node.sinks, (heads if node.heads is None else node.heads.whole,)
    elif isinstance(node.op, Router):
        yield from router_tensors(node.op)
    elif isinstance(node.op, Route):
        yield from ((name, (node.op.num_experts,)) for name in (node.op.correction, node.op.expert_scale) if name)
    elif isinstance(node.op, ScaleBy):
        yield node.op.name, (node.op.size,)
    elif isinstance(node.op, ShortConv):
        yield f"{node.op.name}.weight", (node.op.features, 1, node.op.kernel)
    elif isinstance(node.op, DeltaRule):
        yield from ((name, (node.op.num_heads,)) for name in (node.op.rate, node.op.bias))
    elif isinstance(node.op, TorchFunction):
        yield from node.op.tensors


def head_projections(graph: Graph) -> list[LinearSpec]:
    """Projections of each head by itself; several ops may read different rows of one."""
    ops = (node.op for node in graph.nodes if isinstance(node.op, HeadLinear))
    return list(dict.fromkeys(head_projection(op) for op in ops))


def head_projection(op: HeadLinear) -> LinearSpec:
    """What all heads' rows are together: their weights are read as they are, whatever form they are stored in."""
    spec = LinearSpec((LinearPart(op.name, op.num_heads * op.rows),), op.features)
    if op.heads is None:
        return spec
    whole = LinearSpec((LinearPart(op.name, op.heads.whole * op.rows),), op.features)
    rows = op.heads.start * op.rows, op.heads.stop * op.rows
    return replace(spec, share=Share(whole, ((rows,),)))


def router_tensors(op: Router) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a router reads."""
    yield f"{op.name}.weight", (op.num_experts, op.in_features)
    if op.bias:
        yield f"{op.name}.bias", (op.num_experts,)


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
