"""Cosines and sines for the tokens of a step, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from engine.kernels.torch.rope import Rotary
from engine.kernels.triton.narrow_types import INTERPRETED

BLOCK = 128


@triton.jit
def cos_sin(angle):
    """Of float32, whatever its size: the device's own units are off by more the larger an angle is."""
    if INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:
        return libdevice.cos(angle), libdevice.sin(angle)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions_ptr"])
def rotations_of_tokens(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, count, amplitude, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program ``i``: ``BLOCK`` of the ``count`` numbers of both tables, ``[num_tokens, HALF]``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    position = tl.load(positions_ptr + at // HALF, mask=real, other=0)
    cos, sin = cos_sin(position.to(tl.float32) * tl.load(frequencies_ptr + at % HALF, mask=real, other=0.0))
    tl.store(cos_ptr + at, cos * amplitude, mask=real)
    tl.store(sin_ptr + at, sin * amplitude, mask=real)


def rotation_tables(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """:meth:`Rotary.cos_sin` in float32, but for the last bit. ``positions``: int64 ``[num_tokens]``."""
    half = len(rotary.frequencies)
    shape = (len(positions), 1, half)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
    rotations_of_tokens[(triton.cdiv(cos.numel(), BLOCK),)](
        positions.contiguous(), rotary.frequencies, cos, sin, cos.numel(), rotary.amplitude,
        HALF=half, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return cos, sin
