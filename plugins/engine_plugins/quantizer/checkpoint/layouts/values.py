"""Codes out of words, and values checked on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import Range


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, words]`` -> uint8 ``[rows, words * 32 / bits]``, the lowest bits of a word first. ``bits``: 4 or
    8. Bytes of a word lie lowest first, as on every machine that runs this."""
    # Flat before it is seen as bytes: an axis of one entry may have any stride.
    octets = words.flatten().view(torch.uint8).view(words.shape[0], -1)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def entry_of_each(rows: Sequence[Range], per_entry: int) -> Tensor:
    """int64 ``[rows]``: where the entry of each row is, of those that were read of ``rows``, range by range; one stands
    for ``per_entry`` rows."""
    found, before = [], 0
    for start, stop in rows:
        first = start // per_entry
        found.append(torch.arange(start, stop) // per_entry - first + before)
        before += -(-stop // per_entry) - first
    return torch.cat(found)


def signed(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``0 .. 2**bits - 1`` -> int8 with the middle at 0."""
    if bits == 8:
        return (codes ^ 128).view(torch.int8)
    return codes.view(torch.int8) - 8


def fixed_scale(name: str, scale: Tensor) -> Tensor:
    """A scale that rounding to the nearest makes, as float32. Raises unless all are positive numbers."""
    wide = scale.float()
    if not bool((torch.isfinite(wide) & (wide > 0)).all()):
        raise CheckpointError(f"{name} holds {_odd(wide, wide > 0)}: a scale is a positive number")
    return wide


def fitted_scale(name: str, scale: Tensor) -> Tensor:
    """A scale that was searched for, as float32: some tools make it negative, and 0 where all weights are. Raises
    unless all are numbers."""
    wide = scale.float()
    if not bool(torch.isfinite(wide).all()):
        raise CheckpointError(f"{name} holds {_odd(wide, torch.ones_like(wide, dtype=torch.bool))}: expected numbers")
    return wide


def _odd(values: Tensor, is_right: Tensor) -> float:
    return float(values[~(torch.isfinite(values) & is_right)].flatten()[0])


def first_of(tensors: Mapping[str, Tensor], suffixes: Sequence[str], name: str) -> tuple[str, Tensor]:
    """Name and value of the first tensor that is there."""
    for suffix in suffixes:
        if suffix in tensors:
            return f"{name}.{suffix}", tensors[suffix]
    raise CheckpointError(f"{name} has none of {', '.join(suffixes)}")


def no_zeros(name: str, zeros: Tensor | None) -> None:
    """Raise where a symmetric format has a zero point that is not the middle."""
    if zeros is not None and bool((zeros.float() != 0).any()):
        raise CheckpointError(f"{name} is not all zero, but the weights are said to be symmetric")


def whole(name: str, zeros: Tensor, bits: int) -> Tensor:
    """Zero points as int8. Raises unless they are whole numbers that codes of so many bits have."""
    wide, half = zeros.double(), 1 << (bits - 1)
    is_right = (wide == wide.round()) & (wide >= -half) & (wide < half)
    if not bool(is_right.all()):
        odd = float(wide[~is_right].flatten()[0])
        raise CheckpointError(f"{name} holds {odd:g}: a zero point is a whole number from {-half} to {half - 1}")
    return wide.to(torch.int8)


def bias_of(tensors: Mapping[str, Tensor]) -> Tensor | None:
    bias = tensors.get("bias")
    return None if bias is None else bias.float()


def order_of(name: str, index: Tensor, group_size: int, may_start_anywhere: bool) -> Tensor | None:
    """int64 ``[in]``: input features sorted by group, from ``index [in]``, the group of each; ``None`` if they are
    sorted already. Raises unless every group has its ``group_size`` features (the last: what is left)."""
    groups = index.long()
    if may_start_anywhere:
        groups = groups - groups.min()
    want = torch.arange(groups.numel()) // group_size
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high > int(want[-1]):
        raise CheckpointError(f"{name} has groups {low} to {high}, the layer has 0 to {int(want[-1])}")
    if torch.equal(groups, want):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], want):
        raise CheckpointError(f"{name} does not put {group_size} input features into every group")
    return order
