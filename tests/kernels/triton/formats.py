"""Weight formats to test the kernels with: plain, int8 with a scale per channel, and packed int4 with groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.weights import load_plain

GROUP = 32
"""Input features that share a scale and a zero in the int4 format of these tests."""


@triton.jit
def load_int4(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """uint8 ``[out, in / 2]``, the even column in the low half; float scales and uint8 zeros ``[out, in / group]``."""
    PAIRS: tl.constexpr = BLOCK_K // 2
    pair = start // 2 + tl.arange(0, PAIRS)
    mask = real[:, None] & (pair < IN_FEATURES // 2)[None, :]
    packed = tl.load(weight_ptr + rows[:, None] * (IN_FEATURES // 2) + pair[None, :], mask=mask, other=0)
    group = rows[:, None] * (IN_FEATURES // GROUP_SIZE) + (pair * 2 // GROUP_SIZE)[None, :]
    scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    low = ((packed & 15).to(tl.float32) - zero) * scale
    high = ((packed >> 4).to(tl.float32) - zero) * scale
    return tl.reshape(tl.join(low, high), [rows.shape[0], BLOCK_K]).to(DTYPE)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in a format: how kernels read it, and what it stands for, float32 ``[out, in]``."""

    loader: TileLoader
    dense: Tensor


def plain(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Packed:
    weight = weight.to(dtype)
    return Packed(TileLoader(load_plain, weight, bias=bias), weight.float())


def int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Packed:
    scale = weight.abs().amax(1) / 127.0
    stored = (weight / scale[:, None]).round().to(torch.int8)
    return Packed(TileLoader(load_plain, stored, channel_scale=scale, bias=bias), stored.float() * scale[:, None])


def int4(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Packed:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15.0).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, 15)
    stored = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    dense = ((stored - zero[..., None]) * scale.float()[..., None]).flatten(1).to(dtype).float()
    stored = stored.flatten(1).to(torch.uint8)
    packed = (stored[:, 0::2] | (stored[:, 1::2] << 4)).contiguous()
    loader = TileLoader(load_int4, packed, scale, zero.to(torch.uint8), bias=bias, group_size=GROUP)
    return Packed(loader, dense)


FORMATS: dict[str, Callable[[Tensor, Tensor | None, torch.dtype], Packed]] = {
    "plain": plain,
    "int8": int8,
    "int4": int4,
}
