"""Experts that a checkpoint stores together: each tensor holds all of them along its first axis.

A quantizer reads one expert as any other layer, by suffix. The tensor of all experts' ``weight`` has the name of the
layer, and others' suffix stands after it: ``experts.down_proj``, ``experts.down_proj_bias``,
``experts.down_proj_scales``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from engine.contracts.ops import Experts, LinearPart, LinearSpec, Range, Share
from engine.contracts.quantizer import CheckingQuantizer, Quantizer, StoredHeader, StoredTensor
from engine.models.sharding import cuts_of
from engine.models.stored import is_stored, quantizer_problems, stored_of


def fused_layers(op: Experts) -> tuple[LinearSpec, LinearSpec]:
    """Gate and up, and down, of one expert, by the name of the tensor of all."""
    assert op.fused is not None
    return _in_one_part(op.gate_up, op.fused.gate_up), _in_one_part(op.down, op.fused.down)


def _in_one_part(spec: LinearSpec, name: str) -> LinearSpec:
    slices, share = spec.outputs if len(spec.parts) > 1 else (), spec.share
    if share is not None:
        starts = accumulate((part.out_features for part in share.whole.parts), initial=0)
        rows = [(start + a, start + b) for start, part in zip(starts, share.rows, strict=False) for a, b in part]
        share = Share(_in_one_part(share.whole, name), (tuple(rows),), share.columns)
    return replace(spec, parts=(LinearPart(name, spec.out_features, spec.parts[0].bias, slices),), share=share)


def is_pair(layer: LinearSpec) -> bool:
    """Whether it is gate and up."""
    return bool(layer.parts[0].slices)


def fused_stored(layer: LinearSpec, quantizer: Quantizer | None) -> Iterator[tuple[str, StoredTensor]]:
    """Names of tensors, and what the quantizer asks for of one expert. ``layer``: one of :func:`fused_layers`."""
    for stored in stored_of(quantizer, layer.whole):
        if is_stored(stored, layer.parts[0]):
            yield fused_name(layer.parts[0].name, stored.suffix), stored


def fused_cuts(op: Experts, layer: LinearSpec, stored: StoredTensor) -> list[tuple[int, tuple[Range, ...]]]:
    """What this rank reads of a tensor that holds all experts': :meth:`engine.checkpoint.tensors.Checkpoint.read`."""
    assert op.fused is not None
    found: list[tuple[int, tuple[Range, ...]]] = [] if op.held is None else [(0, op.held.ranges)]
    for axis, ranges in cuts_of(stored, layer, 0):
        if op.fused.interleaved and is_pair(layer) and axis == stored.shard_axes.get("out"):
            # Of gates and of ups the same ones, which lie side by side.
            (start, stop), _ = ranges
            ranges = ((2 * start, 2 * stop),)
        turned = op.fused.transposed and stored.suffix == "weight"
        found.append((2 - axis if turned else 1 + axis, ranges))
    return found


def fused_name(layer: str, suffix: str) -> str:
    """The tensor that holds all experts' ``suffix``."""
    more = suffix.removeprefix("weight").lstrip("_")
    return f"{layer}_{more}" if more else layer


def is_fused(op: Experts, names: Container[str], quantizer: Quantizer | None = None) -> bool:
    """Whether a checkpoint with these tensors stores experts together. ``quantizer``: what reads it, ``None``: weights
    are stored as they are."""
    if op.fused is None:
        return False
    stored = fused_stored(fused_layers(op)[0], quantizer)
    return any(name in names for name, one in stored if one.suffix != "bias" and not one.optional)


def misread(op: Experts, names: Iterable[str], quantizer: Quantizer) -> list[str]:
    """What is wrong where experts are stored together, but not as the quantizer reads them."""
    if op.fused is None or is_fused(op, names := frozenset(names), quantizer):
        return []
    found = {name for name in names if name.startswith(op.fused.gate_up)}
    stored = fused_stored(fused_layers(op)[0], quantizer)
    expected = [name for name, one in stored if one.suffix != "bias" and not one.optional]
    found -= {fused_name(op.fused.gate_up, "bias")}
    said = f"the configuration says that these experts are {' and '.join(expected)}"
    return [f"{', '.join(sorted(found))}: {said}"] if found else []


def fused_problems(op: Experts, headers: Mapping[str, StoredHeader], quantizer: CheckingQuantizer) -> list[str]:
    """What is wrong with tensors that hold all experts. The quantizer is shown the headers of one expert's."""
    assert op.fused is not None and isinstance(quantizer, Quantizer)
    problems: list[str] = []
    for layer in fused_layers(op):
        of_one: dict[str, StoredHeader] = {}
        names: dict[str, str] = {}
        for name, stored in fused_stored(layer, quantizer):
            single = f"{layer.parts[0].name}.{stored.suffix}"
            names[single] = name
            header = headers.get(name)
            if header is None:
                continue
            if header.shape[:1] != (op.num_experts,):
                problems.append(f"{name} has shape {list(header.shape)}, expected {op.num_experts} experts first")
                continue
            shape = header.shape[1:]
            shape = shape[::-1] if op.fused.transposed and stored.suffix == "weight" else shape
            of_one[single] = StoredHeader(header.dtype, shape)
            if op.fused.interleaved and is_pair(layer) and not _takes_turns(stored, shape, layer):
                problems.append(f"{name} has shape {list(header.shape)}: gates and ups alternate and share nothing")
        for problem in quantizer_problems(quantizer, [layer], of_one):
            for single in sorted(names, key=len, reverse=True):
                problem = problem.replace(single, f"{names[single]}[expert]")
            problems.append(problem)
    return problems


def _takes_turns(stored: StoredTensor, shape: tuple[int, ...], layer: LinearSpec) -> bool:
    """Whether alternating gates and ups can be told apart: each output has numbers of its own, or all have the same."""
    axis = stored.shard_axes.get("out")
    return axis is None or (axis < len(shape) and shape[axis] == layer.out_features)
