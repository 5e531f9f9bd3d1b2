"""How unquantized weights are read; the simplest ``load_tile`` (see :class:`engine.contracts.quantizer.TileLoader`)."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.tile_ops import below


@triton.jit
def load_plain(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``weight``: ``[out, in]``, contiguous, of any floating or integer type that ``DTYPE`` holds."""
    columns = start + tl.arange(0, BLOCK_K)
    mask = real[:, None] & below(columns, IN_FEATURES, BLOCK_K)[None, :]
    at = rows[:, None] * IN_FEATURES + columns[None, :]
    # Read once by one program: leave the cache to the activations.
    tile = tl.load(weight_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    if weight_ptr.dtype.element_ty.is_int():
        tile = tile.to(tl.float32)  # the interpreter cannot turn integers into bfloat16; a device goes this way too
    return tile.to(DTYPE)
