"""GPTQ (Frantar et al., arXiv 2210.17323): round column by column; what a column loses, the later ones make up for.

With asymmetric calibration (GPTAQ, arXiv 2504.02692): a layer aims at what the unquantized model computes there, from
the inputs that the rounded layers before it produce.
"""

from __future__ import annotations

import torch
from tools.quantize.calibration import Moments
from tools.quantize.grid import Levels
from torch import Tensor

BLOCK = 128
"""Columns whose corrections are applied to the rest at once."""


def aimed(weight: Tensor, moments: Moments, damping: float) -> Tensor:
    """The weight ``[out, in]`` that, on inputs ``Z``, comes closest to ``X W^T + D``: what the unquantized layer
    computes, and what the residual stream lacks. ``damping`` holds it near ``weight``."""
    hessian = moments.hessian.double()
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    missing = (weight @ (moments.cross - moments.hessian) + moments.drift).double()
    lower, failed = torch.linalg.cholesky_ex(hessian)
    _check(int(failed), damping)
    return weight + torch.cholesky_solve(missing.T, lower).T.float()


def gptq_codes(weight: Tensor, levels: Levels, hessian: Tensor, *, by_activation: bool, damping: float) -> Tensor:
    """Codes ``[out, in]``, as floats, of float32 ``weight [out, in]``.

    ``hessian``: ``X^T X [in, in]``. ``by_activation``: columns with large inputs come first, which lose least; groups
    stay where they are, so nothing is reordered at run time. ``damping``: share of the mean of the diagonal that is
    added to it. Raises ``ValueError`` for a Hessian that stays singular.
    """
    inputs = weight.shape[1]
    hessian, weight = hessian.clone(), weight.clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    weight[:, dead] = 0.0
    order = diagonal.argsort(descending=True) if by_activation else torch.arange(inputs, device=weight.device)
    factor = _inverse_factor(hessian[order][:, order], damping)
    work = weight[:, order]
    column_group = order // levels.grid.group_size
    codes = torch.empty_like(work)
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors = torch.empty_like(work[:, start:end])
        for column in range(start, end):
            group = int(column_group[column])
            scale, zero = levels.scale[:, group], levels.zero[:, group]
            now = work[:, column].clone()
            code = levels.nearest(now, scale, zero)
            error = (now - (code - zero) * scale) / factor[column, column]
            codes[:, column], errors[:, column - start] = code, error
            work[:, column:end] -= error[:, None] * factor[column, column:end]
        work[:, end:] -= errors @ factor[start:end, end:]
    in_place = torch.empty_like(codes)
    in_place[:, order] = codes
    return in_place


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper triangular ``U`` with ``U^T U`` the inverse of the damped Hessian."""
    hessian = hessian.double()
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(hessian)
    _check(int(failed), damping)
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper.float()


def _check(failed: int, damping: float) -> None:
    if failed:
        raise ValueError(f"the Hessian is singular with --damping {damping:g}; set it larger or give more samples")
