"""Grids of few levels: which scales and zeros a group of weights gets, judged by the error of the layer's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight

CLIPS = tuple(1.0 - 0.04 * i for i in range(12))
"""Shares of a group's range that are tried as its end."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Integer levels of ``bits`` bits.

    ``stored``: dtype of the scales in the checkpoint: weights are rounded with the scales that will be read back.
    """

    bits: int
    group_size: int
    symmetric: bool
    stored: torch.dtype

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True)
class Levels:
    """``scale``, ``zero``: float32 ``[out, groups]``: level ``q`` of a group stands for ``(q - zero) * scale``."""

    grid: Grid
    scale: Tensor
    zero: Tensor

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Codes as floats; ``scale`` and ``zero`` broadcast to ``weight``."""
        return (weight / scale).round_().add_(zero).clamp_(self.grid.lowest, self.grid.highest)

    def rounded(self, weight: Tensor) -> Tensor:
        """Codes ``[out, in]``, as floats, of the nearest levels."""
        groups = in_groups(weight, self.grid)
        return self.nearest(groups, self.scale[:, :, None], self.zero[:, :, None]).flatten(1)

    def dense(self, codes: Tensor) -> Tensor:
        """Float32 ``[out, in]``."""
        groups = in_groups(codes, self.grid)
        dense: Tensor = (groups - self.zero[:, :, None]) * self.scale[:, :, None]
        return dense.flatten(1)

    def packed(self, codes: Tensor, bias: Tensor | None) -> QuantizedWeight:
        """As the engine holds it."""
        zero = None if self.grid.symmetric else self.zero.to(torch.int8)
        return QuantizedWeight(
            codes.to(torch.int8).contiguous(),
            self.scale,
            self.grid.group_size,
            bits=self.grid.bits,
            zero=zero,
            bias=bias,
        )


def in_groups(weight: Tensor, grid: Grid) -> Tensor:
    """``[out, in] -> [out, groups, group_size]``"""
    return weight.reshape(len(weight), -1, grid.group_size)


def levels(weight: Tensor, grid: Grid, hessian: Tensor | None, clips: tuple[float, ...] = CLIPS) -> Levels:
    """Scales and zeros for float32 ``weight [out, in]``: of ``clips``, each group takes the end of its range with the
    least error of the outputs, ``e H e`` over its inputs with ``hessian = X^T X [in, in]``; or of the weights, without
    one. Raises ``ValueError`` for groups that do not divide the inputs."""
    if weight.shape[1] % grid.group_size:
        raise ValueError(f"groups of {grid.group_size} do not divide {weight.shape[1]} inputs; choose --group-size")
    groups = in_groups(weight, grid)
    blocks = None if hessian is None else _diagonal_blocks(hessian, grid.group_size)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for clip in clips:
        scale, zero = _range(groups, grid, clip)
        candidate = Levels(grid, scale, zero)
        codes = candidate.nearest(groups, scale[:, :, None], zero[:, :, None])
        error = _error((codes - zero[:, :, None]) * scale[:, :, None] - groups, blocks)
        if best is not None:
            better, (least, old_scale, old_zero) = error < best[0], best
            error = torch.where(better, error, least)
            scale, zero = torch.where(better, scale, old_scale), torch.where(better, zero, old_zero)
        best = (error, scale, zero)
    assert best is not None
    return Levels(grid, best[1], best[2])


def _range(groups: Tensor, grid: Grid, clip: float) -> tuple[Tensor, Tensor]:
    if grid.symmetric:
        scale = stored_scale(groups.abs().amax(dim=2) * (clip / grid.highest), grid)
        return scale, torch.zeros_like(scale)
    low = groups.amin(dim=2).clamp_max(0.0) * clip
    high = groups.amax(dim=2).clamp_min(0.0) * clip
    scale = stored_scale((high - low) / (grid.highest - grid.lowest), grid)
    zero = (grid.lowest - (low / scale).round()).clamp(grid.lowest, grid.highest)
    return scale, zero


def stored_scale(scale: Tensor, grid: Grid) -> Tensor:
    """As it is read back from the checkpoint, in float32, and never 0."""
    info = torch.finfo(grid.stored)
    least = max(1e-10, info.smallest_normal * info.eps)  # what is smaller would be stored as 0
    return scale.clamp_min(least).to(grid.stored).float()


def _error(difference: Tensor, blocks: Tensor | None) -> Tensor:
    """``[out, groups]`` of ``difference [out, groups, size]``."""
    if blocks is None:
        return difference.square().sum(dim=2)
    return (torch.einsum("ogi,gij->ogj", difference, blocks) * difference).sum(dim=2)


def _diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """``[groups, size, size]``"""
    count = hessian.shape[0] // size
    whole = hessian.view(count, size, count, size)
    return torch.stack([whole[i, :, i] for i in range(count)])


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """``||X D^T||^2`` over all outputs, for ``difference [out, in]`` of the weights."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
