"""Scales per input channel that move difficulty between activations and weights, and are folded into what computes the
activations: ``x / s`` and ``W * s`` give the same product, but round differently."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tools.quantize.grid import Grid, levels, output_error
from torch import Tensor

STEPS = 20
"""Exponents tried: 0, 1/20, ... 19/20."""
Share = Callable[[Tensor], Tensor]
"""``[in] -> [in]``: makes channels equal that come from one output of the layer before (value heads that several query
heads use), by their largest."""


def awq_scales(weight: Tensor, grid: Grid, hessian: Tensor, mean_abs: Tensor, share: Share) -> Tensor:
    """AWQ (Lin et al., arXiv 2306.00978): ``s = mean|x| ** alpha``, with the alpha of least output error.

    ``weight``: float32 ``[out, in]``; ``mean_abs [in]``: of the inputs. Returns ``[in]``, 1 if nothing is better.
    """
    best, least = torch.ones_like(mean_abs), torch.inf
    for step in range(STEPS):
        scales = _normal(share(mean_abs).clamp_min(1e-6) ** (step / STEPS))
        scaled = weight * scales
        found = levels(scaled, grid, None, clips=(1.0,))
        error = output_error(found.dense(found.rounded(scaled)) / scales - weight, hessian)
        if error < least:
            best, least = scales, error
    return best


def smooth_scales(weight: Tensor, max_abs: Tensor, alpha: float, share: Share) -> Tensor:
    """SmoothQuant (Xiao et al., arXiv 2211.10438): ``max|x| ** alpha / max|w| ** (1 - alpha)``; ``[in]``."""
    activations = share(max_abs).clamp_min(1e-5)
    weights = share(weight.abs().amax(dim=0)).clamp_min(1e-5)
    return _normal(activations**alpha / weights ** (1.0 - alpha))


def _normal(scales: Tensor) -> Tensor:
    """Around 1, so that neither side leaves the range of its dtype."""
    return scales / (scales.max() * scales.min()).sqrt()
