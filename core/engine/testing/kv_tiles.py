"""Runs the kernel functions of a KV format on flat memory, for its conformance suite."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16


@triton.jit
def _load(stored_ptr, out_ptr, count, LOAD_TILE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK * BLOCK + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = LOAD_TILE(stored_ptr, at.to(tl.int64), at < count, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, tile)


@triton.jit
def _store(stored_ptr, x_ptr, scale_ptr, count, STORE_TILE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK * BLOCK + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < count
    x, scale = tl.load(x_ptr + at, mask=mask, other=0.0), tl.load(scale_ptr + at, mask=mask, other=1.0)
    STORE_TILE(stored_ptr, at.to(tl.int64), x, mask, scale)


def load_all(stored: Tensor, load_tile: Any, dtype: torch.dtype, count: int) -> Tensor:
    """The first ``count`` elements of contiguous ``stored``, loaded tile by tile; ``[tiles * 256]`` in ``dtype``."""
    tiles = triton.cdiv(stored.numel(), BLOCK * BLOCK)
    out = torch.full((tiles * BLOCK * BLOCK,), float("nan"), dtype=dtype, device=stored.device)
    _load[(tiles,)](stored, out, count, LOAD_TILE=load_tile, BLOCK=BLOCK)
    return out


def store_all(stored: Tensor, store_tile: Any, x: Tensor, scale: Tensor, count: int) -> Tensor:
    """``stored``, after the first ``count`` elements of ``x`` were stored in it; all flat and contiguous."""
    tiles = triton.cdiv(stored.numel(), BLOCK * BLOCK)
    _store[(tiles,)](stored, x.contiguous(), scale.contiguous(), count, STORE_TILE=store_tile, BLOCK=BLOCK)
    return stored
