"""Kernels beside the fused ones, for many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.product import tile_scaled, unpacked
from engine.kernels.triton.tile_ops import below, start_dependents, wait_for_input


@triton.jit
def dequantize_tiles(
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, out_ptr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights, ``[OUT_FEATURES, IN_FEATURES]``, rounded once. Program ``(block of channels, block of inputs)``."""
    start_dependents(PDL)
    channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    real = below(channel, OUT_FEATURES, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    loaded = LOAD_TILE(
        weight_ptr, scale_ptr, zero_ptr, channel, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K, tl.float32
    )
    tile = tile_scaled(loaded, unpacked(loaded, UNPACK_TILE, tl.float32), TILE_SCALE)
    if channel_scale_ptr is not None:
        tile *= tl.load(channel_scale_ptr + channel, mask=real, other=0.0)[:, None]
    wait_for_input(PDL)  # for whoever still reads the memory that is written now
    column = start + tl.arange(0, BLOCK_K)
    mask = real[:, None] & below(column, IN_FEATURES, BLOCK_K)[None, :]
    at = channel[:, None] * IN_FEATURES + column[None, :]
    tl.store(out_ptr + at, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_sums(
    sum_ptr, step_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    OUT_FEATURES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 sums ``[rows, OUT_FEATURES]`` times each row's step and each channel's scale, plus the bias. Program
    ``(row, block of channels)``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = below(channel, OUT_FEATURES, BLOCK)
    sums = tl.load(sum_ptr + row * OUT_FEATURES + channel, mask=mask, other=0).to(tl.float32)
    y = sums * tl.load(step_ptr + row) * tl.load(channel_scale_ptr + channel, mask=mask, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUT_FEATURES + channel, y.to(out_ptr.dtype.element_ty), mask=mask)


def dequantized(loader: TileLoader, out_features: int, in_features: int, dtype: torch.dtype, launch: Launch) -> Tensor:
    """The weights ``[out_features, in_features]`` in ``dtype``, in new memory."""
    out = torch.empty(out_features, in_features, dtype=dtype, device=loader.weight.device)
    block_n, block_k = 16, 256
    dequantize_tiles[(triton.cdiv(out_features, block_n), triton.cdiv(in_features, block_k))](
        loader.weight, loader.scale, loader.zero, loader.channel_scale, out,
        IN_FEATURES=in_features, OUT_FEATURES=out_features, GROUP_SIZE=loader.group_size,
        LOAD_TILE=loader.load_tile, UNPACK_TILE=loader.unpack_tile, TILE_SCALE=loader.tile_scale,
        BLOCK_N=block_n, BLOCK_K=block_k, **launch.options(4),
    )  # fmt: skip
    return out


def scaled_sums(
    sums: Tensor, step: Tensor, channel_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, launch: Launch
) -> Tensor:
    """int32 ``[rows, out]``, float32 ``[rows, 1]`` and ``[out]`` -> ``[rows, out]`` in ``dtype``."""
    assert sums.is_contiguous()
    rows, out_features = sums.shape
    out = torch.empty(rows, out_features, dtype=dtype, device=sums.device)
    block = min(1024, triton.next_power_of_2(out_features))
    scale_sums[(rows, triton.cdiv(out_features, block))](
        sums, step, channel_scale, bias, out, OUT_FEATURES=out_features, BLOCK=block, **launch.options(4)
    )
    return out
