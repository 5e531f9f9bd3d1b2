"""What a rank reads of a stored tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from engine.contracts.ops import LinearSpec, Range
from engine.contracts.quantizer import Quantizer, StoredTensor
from engine.models.stored import stored_of

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["out", "in"]


def smallest_cut(quantizer: Quantizer, spec: LinearSpec, axis: Axis) -> int | None:
    """Features of a layer that no cut separates, counted from the first of each value that it makes; ``None``: it
    cannot be cut along this axis."""
    features = 1
    for stored in stored_of(quantizer, spec):
        if axis in stored.shard_axes:
            entry = 1 if axis in stored.overlapping else stored.per_entry.get(axis, 1)
            features = math.lcm(features, entry, stored.together.get(axis, 1))
        elif axis not in stored.replicated and not (stored.suffix == "bias" and axis == "in"):
            return None
    if axis == "out" and any(begin % features for part in spec.parts for begin in accumulate(part.slices)):
        return None  # one value begins inside of an entry of another
    return features


def entries(stored: StoredTensor, spec: LinearSpec, part: int) -> tuple[int, tuple[Range, ...]] | None:
    """Which axis of a part's tensor this rank cuts, and what it reads along it, in order; ``None``: all of it."""
    share = spec.share
    if share is None:
        return None
    axis: Axis = "out" if share.columns is None else "in"
    if axis not in stored.shard_axes:
        return None
    ranges = share.rows[part] if share.columns is None else (share.columns,)
    per = stored.per_entry.get(axis, 1)
    return stored.shard_axes[axis], tuple((start // per, -(-stop // per)) for start, stop in ranges)


def cuts_of(stored: StoredTensor, spec: LinearSpec, part: int) -> tuple[tuple[int, tuple[Range, ...]], ...]:
    """What this rank reads of a part's tensor: :meth:`engine.checkpoint.tensors.Checkpoint.read`."""
    found = entries(stored, spec, part)
    return () if found is None else (found,)


def has_bias(spec: LinearSpec) -> bool:
    """Whether this rank adds the biases that the layer has: of summands only one may bring them."""
    return spec.share is None or spec.share.columns is None or spec.share.columns[0] == 0


def taken(tensor: Tensor, stored: StoredTensor, spec: LinearSpec, part: int) -> Tensor:
    """This rank's entries of a tensor at hand."""
    found = entries(stored, spec, part)
    if found is None or tensor.dim() == 0:
        return tensor
    axis, ranges = found
    return joined([tensor.narrow(axis, start, stop - start) for start, stop in ranges], axis)


def joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """One after another along ``axis``, contiguous."""
    import torch

    return torch.cat(list(pieces), dim=axis) if len(pieces) > 1 else pieces[0].contiguous()
