"""Sums of ranks in one launch. Runs in Triton's interpreter, or on a CUDA device (see ``tests/interpreted.py``)."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.sums import BLOCK, sum_in_order
from engine_plugins.communicator.calls import in_rank_order

from ...launches import count_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, BLOCK + 3])
def test_parts_are_added_in_order_and_rounded_once(device: str, size: int, count: int, dtype: torch.dtype) -> None:
    """Values of so different sizes that another order, or a rounding in between, would show."""
    generator = torch.Generator().manual_seed(size + count)
    scales = torch.tensor([10.0 ** (i % 4) for i in range(count)])[:, None]
    parts = (torch.randn(count, size, generator=generator) * scales).to(device, dtype)
    out = torch.full((size,), 7.0, dtype=dtype, device=device)
    with count_launches() as launches:
        assert sum_in_order(parts.unbind(), out) is out
    assert launches.names == ["add_in_order"] * (size > 0)
    want = in_rank_order(parts.unbind()).to(dtype)
    cut = dtype == torch.bfloat16 and device == "cpu"  # Triton's interpreter cuts what a device rounds
    torch.testing.assert_close(out, want, rtol=2.0**-7 if cut else 0.0, atol=0.0)
