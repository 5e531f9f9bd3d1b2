"""int8 matrix units of a CPU (AMX, VNNI) for weight-only quantization.

Weights are 8 bits, activations more. A row of activations is written in fixed point with a few 8-bit digits
("limbs"): ``x ~ step * (a * 255 + b)`` with ``a``, ``b`` in -127..127. All limbs of all rows are multiplied in one
int8 GEMM, exactly, and added up in float32. Decoding is bound by reading the weights, so the second limb is almost
free there, and weights travel at half the bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BASE = 255
"""The digits -127..127 are balanced base 255: every integer up to half its power has exactly one form."""
FEW_ROWS = 32
"""Up to this many rows, reading the weights is what costs: all limbs go through one GEMM. Beyond it, one GEMM a limb
that adds to the last one's result saves writing and adding the partial products."""
ROW_CHUNK = 128
"""Rows of activations per GEMM: their float32 results stay in the cache."""
LIMB_CHUNK = 1 << 17
"""Activations turned into digits at a time, for the same reason."""


def has_int8_units() -> bool:
    """Whether int8 products are exact and fast here. (Older CPUs add pairs in 16 bits and may saturate.)"""
    return torch._C._has_mkldnn and bool(torch.cpu._is_vnni_supported())


def pack_int8(weight: Tensor) -> Tensor:
    """int8 ``[out, in]`` -> an opaque tensor in oneDNN's layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def unpack_int8(packed: Tensor) -> Tensor:
    """int8 ``[out, in]`` back from :func:`pack_int8`."""
    return packed.to_dense().t()


def limb_linear(packed: Tensor, scale: Tensor, bias: Tensor | None, limbs: int) -> Callable[[Tensor], Tensor]:
    """``x [M, in] -> [M, out]`` in the dtype of ``x``. ``scale``: float32 ``[out]``; ``bias``: float32 or ``None``."""
    multiply = _Int8Gemm(packed, scale)

    def chunk(x: Tensor) -> Tensor:
        digits, step = to_limbs(x, limbs)
        rows = x.shape[0]
        if rows <= FEW_ROWS:
            total = from_limbs(multiply(digits.flatten(0, 1)), limbs)
        else:
            total = multiply(digits[0], float(BASE ** (limbs - 1)))
            for i in range(1, limbs):
                total = multiply.onto(total, digits[i], float(BASE ** (limbs - 1 - i)))
        total.mul_(step)
        if bias is not None:
            total.add_(bias)
        return total.to(x.dtype)

    def linear(x: Tensor) -> Tensor:
        if x.shape[0] <= ROW_CHUNK:
            return chunk(x)
        out = x.new_empty(x.shape[0], scale.shape[0])
        for source, target in zip(torch.split(x, ROW_CHUNK), torch.split(out, ROW_CHUNK), strict=True):
            target.copy_(chunk(source))
        return out

    return linear


class _Int8Gemm:
    """``[M, in]`` int8 times packed weights and their scales, exact in int32, handed out in float32."""

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self._packed = packed
        self._scale = scale
        self._zero_points = torch.zeros(scale.shape[0], dtype=torch.int32)
        self._plain = torch.ops.onednn.qlinear_pointwise.default
        self._onto = torch.ops.onednn.qlinear_pointwise.binary

    def __call__(self, digits: Tensor, factor: float = 1.0) -> Tensor:
        y: Tensor = self._plain(
            digits, factor, 0, self._packed, self._scale, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y

    def onto(self, total: Tensor, digits: Tensor, factor: float) -> Tensor:
        """Added to ``total``, in place."""
        y: Tensor = self._onto(
            digits, factor, 0, self._packed, self._scale, self._zero_points,
            total, None, 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], "",
        )  # fmt: skip
        return y


def to_limbs(x: Tensor, limbs: int) -> tuple[Tensor, Tensor]:
    """int8 digits ``[limbs, M, in]``, most significant first, and the step of each row, float32 ``[M, 1]``."""
    digits = torch.empty((limbs, *x.shape), dtype=torch.int8)
    step = torch.empty((x.shape[0], 1), dtype=torch.float32)
    rows = max(1, LIMB_CHUNK // x.shape[1])
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        _split(x[part], digits[:, part], step[part])
    return digits, step


def _split(x: Tensor, digits: Tensor, step: Tensor) -> None:
    limbs = digits.shape[0]
    # A hair below the largest integer the digits can write, so that float32 rounding never passes it.
    largest = (BASE**limbs - 1) / 2 * (1.0 - 2.0**-22)
    wide = x.float()
    torch.div(wide.abs().amax(dim=-1, keepdim=True), largest, out=step).clamp_min_(1e-30)
    rest = (wide / step).round_()
    for i in range(limbs - 1):
        weight = BASE ** (limbs - 1 - i)
        digit = (rest / weight).round_()
        digits[i].copy_(digit)
        rest.sub_(digit, alpha=weight)
    digits[limbs - 1].copy_(rest)


def from_limbs(y: Tensor, limbs: int) -> Tensor:
    """Add up the products of the digits: ``[limbs * M, out] -> [M, out]``."""
    parts = y.chunk(limbs)
    total = parts[0]
    for part in parts[1:]:
        total = torch.add(part, total, alpha=BASE)
    return total
