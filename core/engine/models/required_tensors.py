"""Which tensors of a checkpoint a graph reads, and whether a checkpoint has them: decided from headers alone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.border.calls import broken, shown
from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import name_list
from engine.contracts.graph import Block, Graph
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
    ShortConv,
)
from engine.contracts.quantizer import (
    CheckingQuantizer,
    KVScaleNames,
    KVScaleReader,
    Quantizer,
    StoredHeader,
    StoredTensor,
)

if TYPE_CHECKING:
    from engine.checkpoint.tensors import Checkpoint

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that old checkpoints have although they follow from the configuration."""


def check_readable(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer, path: str) -> None:
    """Raise :class:`CheckpointError` with everything that headers show the quantizer cannot read."""
    if not isinstance(quantizer, CheckingQuantizer):
        return
    entries = ((name, checkpoint.entry(name)) for name in checkpoint.names)
    headers = {name: StoredHeader(str(entry.dtype).removeprefix("torch."), entry.shape) for name, entry in entries}
    problems = quantizer.problems(list(linears(graph, checkpoint.names)), headers)
    if isinstance(problems, str) or not all(isinstance(problem, str) for problem in problems):
        raise broken(quantizer, "problems", f"returned {shown(problems)}, expected a list of texts")
    if problems:
        raise CheckpointError("\n  ".join((f"model.path={path}: the checkpoint cannot be read:", *problems)))


def check_names(checkpoint: Checkpoint, graph: Graph, quantizer: Quantizer, path: str) -> None:
    """Every tensor that the graph needs is there, and none is left over: a leftover is a weight we would silently
    drop."""
    required, optional = expected_names(graph, quantizer, checkpoint.names)
    missing = required - checkpoint.names
    if missing:
        raise CheckpointError(f"model.path={path}: tensors missing from the checkpoint: {name_list(missing)}")
    known = required | optional | unread_names(graph, checkpoint.names)
    leftover = {name for name in checkpoint.names - known if not name.endswith(IGNORED_SUFFIXES)}
    if leftover:
        raise CheckpointError(
            f"model.path={path}: the checkpoint has tensors this architecture does not use: {name_list(leftover)}"
        )


def unread_names(graph: Graph, names: Iterable[str]) -> set[str]:
    """Those that belong to parts of the checkpoint that the model does not read."""
    return {name for name in names if name.startswith(graph.ignored)}


def unread_bytes(graph: Graph, checkpoint: Checkpoint) -> int:
    """Of :func:`unread_names`."""
    return sum(checkpoint.entry(name).num_bytes for name in unread_names(graph, checkpoint.names))


def unread_note(graph: Graph, checkpoint: Checkpoint) -> str:
    """What is not read, for the plan; empty if everything is."""
    unread = unread_names(graph, checkpoint.names)
    if not unread:
        return ""
    parts = ", ".join(f"{prefix}*" for prefix in graph.ignored if any(name.startswith(prefix) for name in unread))
    size = unread_bytes(graph, checkpoint) / 1e9
    return f"{len(unread)} tensors of the checkpoint ({size:.1f} GB) are not read: {parts}"


def expected_names(graph: Graph, quantizer: Quantizer, names: Container[str]) -> tuple[set[str], set[str]]:
    """The tensors that a checkpoint must have, and those that it may have. ``names``: those that it has."""
    required = {name for name, _ in small_tensors(graph)}
    for node in graph.nodes:
        if isinstance(node.op, Experts) and is_fused(node.op, names):
            required |= {name for name, _ in fused_tensors(node.op)}
    optional: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.op, Linear) and node.op.tied:
            # Some checkpoints store the tied weight twice.
            optional |= {f"{part.name}.weight" for part in node.op.spec.parts}
    for spec in linears(graph, names):
        of_linear = linear_names(spec, quantizer)
        required |= of_linear[0]
        optional |= of_linear[1]
    for layer in graph.layers:
        for node in layer.nodes:
            if isinstance(node.op, KVWrite):
                optional |= set(kv_scale_names(quantizer, projection(layer, node.inputs[0])).all)
    return required, optional


def linears(graph: Graph, names: Container[str] = ()) -> Iterator[LinearSpec]:
    """Every linear layer that is read from the checkpoint: a tied head is the embedding, and experts that are stored in
    one tensor (``names``: what the checkpoint has) are no layers of their own."""
    for node in graph.nodes:
        tied = isinstance(node.op, Linear) and node.op.tied
        if not tied and not (isinstance(node.op, Experts) and is_fused(node.op, names)):
            yield from linears_of(node.op)


def is_fused(op: Experts, names: Container[str]) -> bool:
    """Whether a checkpoint with these tensors has all experts in one."""
    return op.fused is not None and op.fused.gate_up in names


def fused_tensors(op: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of tensors that hold all experts."""
    assert op.fused is not None
    for name, spec in ((op.fused.gate_up, op.gate_up), (op.fused.down, op.down)):
        last = (spec.in_features, spec.out_features) if op.fused.transposed else (spec.out_features, spec.in_features)
        yield name, (op.num_experts, *last)
        if spec.parts[0].bias:
            yield f"{name}_bias", (op.num_experts, spec.out_features)


def linears_of(op: Op) -> tuple[LinearSpec, ...]:
    """The linear layers of one op, in the order in which they are packed."""
    if isinstance(op, Linear):
        return (op.spec,)
    if isinstance(op, Experts):
        return tuple(spec for pair in expert_linears(op) for spec in pair)
    return ()


def expert_linears(op: Experts) -> list[tuple[LinearSpec, LinearSpec]]:
    """Gate and up, and down, of each expert."""
    return [(_numbered(op.gate_up, i), _numbered(op.down, i)) for i in range(op.num_experts)]


def _numbered(spec: LinearSpec, number: int) -> LinearSpec:
    parts = tuple(replace(part, name=part.name.replace("{}", str(number))) for part in spec.parts)
    return replace(spec, parts=parts)


def norm_tensors(op: Norm) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a norm reads."""
    shape = (op.by_head, op.size) if op.by_head else (op.size,)
    if op.name is not None:
        yield f"{op.name}.weight", shape
        if op.bias:
            yield f"{op.name}.bias", shape


def small_tensors(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors beside those of linear layers."""
    by_heads: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.op, Embed):
            yield f"{node.op.name}.weight", (node.op.vocab_size, node.op.size)
        elif isinstance(node.op, Norm):
            yield from norm_tensors(node.op)
        elif isinstance(node.op, HeadLinear):
            if node.op.name not in by_heads:  # ops may read different rows of one tensor
                yield f"{node.op.name}.weight", (node.op.num_heads * node.op.rows, node.op.features)
            by_heads.add(node.op.name)
        elif isinstance(node.op, Attention) and node.sinks is not None:
            yield node.sinks, (node.op.num_heads,)
        elif isinstance(node.op, Router):
            yield from router_tensors(node.op)
        elif isinstance(node.op, Route) and node.op.correction is not None:
            yield node.op.correction, (node.op.num_experts,)
        elif isinstance(node.op, ShortConv):
            yield f"{node.op.name}.weight", (node.op.features, 1, node.op.kernel)
        elif isinstance(node.op, DeltaRule):
            yield from ((name, (node.op.num_heads,)) for name in (node.op.rate, node.op.bias))


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


def kv_scale_names(quantizer: Quantizer, qkv: LinearSpec | None) -> KVScaleNames:
    """Where the checkpoint may have scales for a layer's cache; ``qkv``: what its keys come from."""
    if qkv is None or not isinstance(quantizer, KVScaleReader):
        return KVScaleNames()
    found = quantizer.kv_scale_names(qkv)
    if not isinstance(found, KVScaleNames):
        raise broken(quantizer, "kv_scale_names", f"returned {shown(found)}, expected KVScaleNames")
    return found
