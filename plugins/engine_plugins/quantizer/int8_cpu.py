"""int8 matrix units of a CPU (AMX, VNNI) for weight-only quantization.

Weights are 8 bits, activations more. A row of activations is written in fixed point with a few 8-bit digits
("limbs"): ``x ~ step * (a * 254 + b)`` with ``a``, ``b`` in -127..127. All limbs of all rows are multiplied in one
int8 GEMM, exactly, and added up in float32. Decoding is bound by reading the weights, so the second limb is almost
free there, and weights travel at half the bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BASE = 254
"""Digits -127..127 in base 254 reach every integer: rounding leaves a rest of at most half the base."""
ROW_CHUNK = 256
"""Rows of activations per GEMM: bounds the float32 results that wait to be added up."""


def has_int8_units() -> bool:
    """Whether int8 products are exact and fast here. (Older CPUs add pairs in 16 bits and may saturate.)"""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())


def pack_int8(weight: Tensor) -> Tensor:
    """int8 ``[out, in]`` -> an opaque tensor in oneDNN's layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def unpack_int8(packed: Tensor) -> Tensor:
    """int8 ``[out, in]`` back from :func:`pack_int8`."""
    return packed.to_dense().t()


def limb_linear(
    packed: Tensor, scale: Tensor, bias: Tensor | None, limbs: int
) -> Callable[[Tensor], Tensor]:
    """``x [M, in] -> [M, out]`` in the dtype of ``x``. ``scale``: float32 ``[out]``; ``bias``: float32 or ``None``."""
    zero_points = torch.zeros(scale.shape[0], dtype=torch.int32)
    gemm = torch.ops.onednn.qlinear_pointwise.default

    def chunk(x: Tensor) -> Tensor:
        digits, step = to_limbs(x, limbs)
        y: Tensor = gemm(
            digits, 1.0, 0, packed, scale, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        total = from_limbs(y, limbs).mul_(step)
        if bias is not None:
            total.add_(bias)
        return total.to(x.dtype)

    def linear(x: Tensor) -> Tensor:
        if x.shape[0] <= ROW_CHUNK:
            return chunk(x)
        return torch.cat([chunk(part) for part in x.split(ROW_CHUNK)])

    return linear


def to_limbs(x: Tensor, limbs: int) -> tuple[Tensor, Tensor]:
    """int8 digits ``[limbs * M, in]``, most significant first, and the step of each row, float32 ``[M, 1]``."""
    largest = 127 * sum(BASE**i for i in range(limbs))
    wide = x.float()
    step = wide.abs().amax(dim=-1, keepdim=True).div_(largest).clamp_min_(1e-30)
    rest = (wide / step).round_()
    digits = torch.empty((limbs, *x.shape), dtype=torch.int8)
    for i in range(limbs - 1):
        weight = BASE ** (limbs - 1 - i)
        digit = (rest / weight).round_()
        digits[i] = digit
        rest.sub_(digit, alpha=weight)
    digits[limbs - 1] = rest
    return digits.flatten(0, 1), step


def from_limbs(y: Tensor, limbs: int) -> Tensor:
    """Add up the products of the digits: ``[limbs * M, out] -> [M, out]``."""
    parts = y.chunk(limbs)
    total = parts[0]
    for part in parts[1:]:
        total = torch.add(part, total, alpha=BASE)
    return total
