"""Reads a whole weight through a quantizer's tile functions, for its conformance suite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.product import tile_scaled, unpacked

BLOCK_N = 16


@triton.jit
def _read(
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, row_ptr, out_ptr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(row_ptr + feature)
    real = row < OUT_FEATURES
    start = tl.program_id(1) * BLOCK_K
    loaded = LOAD_TILE(weight_ptr, scale_ptr, zero_ptr, row, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K, tl.float32)
    tile = tile_scaled(loaded, unpacked(loaded, UNPACK_TILE, tl.float32), TILE_SCALE)
    if channel_scale_ptr is not None:
        tile *= tl.load(channel_scale_ptr + row, mask=real, other=1.0)[:, None]
    column = start + tl.arange(0, BLOCK_K)
    tl.store(out_ptr + feature[:, None] * (tl.num_programs(1) * BLOCK_K) + column[None, :], tile)


def read_tiles(loader: TileLoader, rows: Tensor, out_features: int, in_features: int, block_k: int) -> Tensor:
    """Weights of the channels ``rows``, int64, a multiple of :data:`BLOCK_N` of them; those from ``out_features`` on do
    not exist. float32 ``[rows, in_features rounded up to block_k]``, in tiles of ``block_k`` inputs."""
    tiles = triton.cdiv(in_features, block_k)
    out = torch.full((len(rows), tiles * block_k), float("nan"), device=rows.device)
    _read[(len(rows) // BLOCK_N, tiles)](
        loader.weight, loader.scale, loader.zero, loader.channel_scale, rows, out,
        IN_FEATURES=in_features, OUT_FEATURES=out_features, GROUP_SIZE=loader.group_size,
        LOAD_TILE=loader.load_tile, UNPACK_TILE=loader.unpack_tile, TILE_SCALE=loader.tile_scale,
        BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_warps=1,
    )  # fmt: skip
    return out
