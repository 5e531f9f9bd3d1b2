"""Heads by themselves in C++ as in torch."""

import pytest
import torch

from engine.contracts.ops import HeadLinear, HeadSlice
from engine.kernels.cpu.head_ops import joined_heads, multiplied_heads, sliced_heads
from tests.needs import needs_compiler

pytestmark = needs_compiler
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


def heads(rows, count, dim, dtype, seed=0):
    """As columns in the middle of wider rows, and by head."""
    x = torch.randn(rows, count * dim + 5, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, 2:-3]
    return x, x.reshape(rows, count, dim)


@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_parts_of_heads_are_cut_and_joined(dtype, rows):
    a, a_heads = heads(rows, 3, 10, dtype)
    b, b_heads = heads(rows, 3, 4, dtype, 1)
    assert torch.equal(sliced_heads(HeadSlice(10, 2, 9), 30, dtype)(a), a_heads[..., 2:9].flatten(1))
    assert torch.equal(joined_heads(3, (30, 12), dtype)(a, b), torch.cat((a_heads, b_heads), -1).flatten(1))


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "count", "features"), [(1, 3, 10), (4, 2, 64), (16, 16, 130)])
def test_each_head_has_a_matrix_of_its_own(dtype, transposed, rows, count, features):
    op = HeadLinear("w", count, 14, features, 3, 11, transposed)
    weight = torch.randn(count, 14, features, generator=torch.Generator().manual_seed(2)).to(dtype)
    x, by_head = heads(rows, count, 8 if transposed else features, dtype)
    part = weight[:, 3:11].float()
    want = torch.einsum("rhj,hji->rhi" if transposed else "rhi,hji->rhj", by_head.float(), part).flatten(1)
    got = multiplied_heads(op, weight)(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
