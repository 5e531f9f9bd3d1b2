"""Ranges of groups chosen by what they do to the layer's output, each beside all others of its row as they are rounded.

AWQ (Lin et al., arXiv 2306.00978) clips a group where the error of its own outputs is least, its two ends together.
Here scale and zero move separately and a row's groups in turn, as in coordinate descent, so that a group's range also
makes up for the errors of the others; codes stay those of the nearest levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tools.quantize.grid import Grid, Levels, levels, stored_scale
from torch import Tensor

WIDTHS = (0.25, 0.15, 0.1)
"""One round over all groups each: how far a scale may move, as a share of itself."""
SCALES = 25
"""Scales tried per group and round."""
ZEROS = (-1, 0, 1)
"""Moves of the zero point tried with each."""


def output_ranges(weight: Tensor, grid: Grid, hessian: Tensor, target: Tensor) -> Levels:
    """Levels for float32 ``weight [out, in]``, with the nearest of which it computes about what it should.

    ``hessian``: ``Z^T Z [in, in]`` of the inputs; ``target``: ``Y^T Z [out, in]``, where ``Y`` is the wanted output.
    What is made small is ``|Y - Z Q^T|^2``, by row: ``q H q - 2 q t`` and a constant. Raises what
    :func:`tools.quantize.grid.levels` does.
    """
    found = levels(weight, grid, hessian)
    scale, zero = found.scale.clone(), found.zero.clone()
    dense = found.dense(found.rounded(weight))
    slope = dense @ hessian - target  # half the gradient by the rounded weight
    for width in WIDTHS:
        for group in range(scale.shape[1]):
            columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
            block = hessian[columns, columns]
            moved = _best_move(weight[:, columns], dense[:, columns], slope[:, columns], block, found, group, width)
            change, scale[:, group], zero[:, group] = moved
            dense[:, columns] += change
            slope += change @ hessian[columns]
            found = Levels(grid, scale, zero)
    return found


def _best_move(
    weight: Tensor, dense: Tensor, slope: Tensor, block: Tensor, now: Levels, group: int, width: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one group, ``[out, group_size]``: what to add to the rounded weight, and the scale and zero ``[out]`` that do
    so; nothing moves in rows where no move helps. ``block``: the Hessian of the group's inputs."""
    grid, old_scale, old_zero = now.grid, now.scale[:, group, None], now.zero[:, group, None]
    best, scale, zero = torch.zeros_like(old_scale), old_scale, old_zero
    change = torch.zeros_like(weight)
    for factor in _factors(width):
        new_scale = stored_scale(old_scale * factor, grid)
        for shift in (0,) if grid.symmetric else ZEROS:
            new_zero = (old_zero + shift).clamp(grid.lowest, grid.highest)
            step = (now.nearest(weight, new_scale, new_zero) - new_zero) * new_scale - dense
            gain = torch.einsum("oi,oi->o", torch.addmm(2.0 * slope, step, block), step)[:, None]
            better = gain < best
            best, change = torch.where(better, gain, best), torch.where(better, step, change)
            scale, zero = torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
    return change, scale[:, 0], zero[:, 0]


def _factors(width: float) -> Sequence[float]:
    factors: list[float] = torch.linspace(1.0 - width, 1.0 + width, SCALES).tolist()
    return factors
