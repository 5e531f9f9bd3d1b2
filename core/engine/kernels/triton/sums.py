"""What ranks have computed of the same numbers, added up in the order of the ranks in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input

BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def add_in_order(part_ptr, out_ptr, stride, size, COUNT: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """``((first + second) + third) + ...`` in float32, rounded once. Program ``block of numbers``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.load(part_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, COUNT):
        total += tl.load(part_ptr + index * stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_in_order(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    """``x``, contiguous, overwritten with the sum of ``parts``: as many numbers each, of its dtype, equally far
    apart in one tensor."""
    size, offsets = x.numel(), [part.storage_offset() for part in parts]
    stride = offsets[1] - offsets[0] if len(parts) > 1 else 0
    assert x.is_contiguous() and all(part.numel() == size and part.dtype == x.dtype for part in parts)
    assert offsets == [offsets[0] + index * stride for index in range(len(parts))]
    if size:
        add_in_order[(triton.cdiv(size, BLOCK),)](
            parts[0], x, stride, size, COUNT=len(parts), BLOCK=BLOCK, **Launch.on(x.device.type).options(4)
        )
    return x
