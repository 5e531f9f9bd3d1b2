"""What ranks have computed of the same numbers, added up in the order of the ranks in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input

BLOCK = 1024


@triton.jit
def add_in_order(parts, out_ptr, size, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """``((first + second) + third) + ...`` in float32, rounded once. ``parts``: pointers. Program ``block of
    numbers``. Loads are 16 bytes wide where ``size`` is known to be a multiple of 16, as rows of a model are."""
    start_dependents(PDL)
    wait_for_input(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.load(parts[0] + at, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, len(parts)):
        total += tl.load(parts[index] + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_in_order(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    """``x``, contiguous, overwritten with the sum of ``parts``: as many numbers each, of its dtype, each in a row in
    memory that its device reads."""
    size = x.numel()
    assert all(part.is_contiguous() and part.numel() == size and part.dtype == x.dtype for part in (x, *parts))
    if size:
        add_in_order[(triton.cdiv(size, BLOCK),)](
            tuple(parts), x, size, BLOCK=BLOCK, **Launch.on(x.device.type).options(4)
        )
    return x
