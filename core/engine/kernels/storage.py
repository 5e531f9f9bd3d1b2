"""How what a KV format stores looks to kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache


def as_bits(stored: Tensor) -> Tensor:
    """8-bit floats as uint8, for operations and kernels that do not know them; anything else as it is."""
    return stored.view(torch.uint8) if stored.dtype.is_floating_point and stored.itemsize == 1 else stored


def stored_tensors(cache: LayerCache) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and their scales as Triton kernels take them: 8-bit floats as uint8."""
    return as_bits(cache.k), as_bits(cache.v), cache.k_scale, cache.v_scale


def largest_value(dtype: torch.dtype) -> float:
    """The largest number of a storage dtype: what a scale per token and head maps its largest element to."""
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)
