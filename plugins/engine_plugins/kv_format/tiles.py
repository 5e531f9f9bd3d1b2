"""How kernels read and write 8-bit keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.narrow_types import from_e4m3, from_int8, to_e4m3, to_int8


@triton.jit
def load_int8(ptr, offsets, mask, DTYPE: tl.constexpr):
    """See :meth:`engine.contracts.kv_format.KVFormat.load_tile`."""
    return from_int8(tl.load(ptr + offsets, mask=mask, other=0), DTYPE)


@triton.jit
def store_int8(ptr, offsets, x, mask, scale):
    """See :meth:`engine.contracts.kv_format.KVFormat.store_tile`."""
    tl.store(ptr + offsets, to_int8(tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))), mask=mask)


@triton.jit
def load_e4m3(ptr, offsets, mask, DTYPE: tl.constexpr):
    """See :meth:`engine.contracts.kv_format.KVFormat.load_tile`."""
    return from_e4m3(tl.load(ptr + offsets, mask=mask, other=0), DTYPE)


@triton.jit
def store_e4m3(ptr, offsets, x, mask, scale):
    """See :meth:`engine.contracts.kv_format.KVFormat.store_tile`."""
    tl.store(ptr + offsets, to_e4m3(tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))), mask=mask)
