"""Single ops as C++ kernels compute what torch computes of them."""

import pytest
import torch
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache
from engine.contracts.ops import Norm, PositionScale
from engine.kernels.cpu.elementwise import ACTS, Combine, head_norms, rotated_heads, scaled_by_position, write_kv
from engine.kernels.torch.norms import layer_norm, rms_norm
from engine.kernels.torch.reference import activated, soft_capped
from engine.kernels.torch.rope import rotate, rotate_interleaved
from engine.testing.attention_cases import PlainFormat
from tests.needs import needs_compiler

pytestmark = needs_compiler
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
WIDTHS = pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 40), (17, 75), (5, 1), (0, 8)])


def strided(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Columns in the middle of wider rows."""
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(rows, width + 7, generator=generator)).to(dtype)[:, 3 : 3 + width]


def assert_alike(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want.to(got.dtype), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@DTYPES
@pytest.mark.parametrize("act", ACTS)
@WIDTHS
def test_activations_alone_and_of_gates(dtype, act, rows, width):
    x, up = strided(rows, width, dtype), strided(rows, width, dtype, 1)
    want = activated(x.float(), act)
    assert_alike(Combine("activated", width, act)(x), want)
    assert_alike(Combine("gated", width, act)(x, up), want * up.float())


@DTYPES
@WIDTHS
def test_sums_gates_scales_and_caps(dtype, rows, width):
    a, b, gate = (strided(rows, size, dtype, seed) for seed, size in enumerate((width, width, 1)))
    wide, other = a.float(), b.float()
    assert_alike(Combine("add", width)(a, b), wide + other)
    assert_alike(Combine("gate", width)(a, b), wide * other.sigmoid())
    assert_alike(Combine("gate_all", width)(a, gate), wide * gate.float().sigmoid())
    assert_alike(Combine("scaled", width, factor=0.37)(a), 0.37 * wide)
    assert_alike(Combine("capped", width, factor=1.5)(a), soft_capped(wide, 1.5))


@DTYPES
@WIDTHS
def test_scales_by_position(dtype, rows, width):
    x, positions = strided(rows, width, dtype), torch.arange(rows) * 5
    for offset in (0, 4):
        want = x.float() * (1.0 + 0.3 * torch.log1p(((positions + offset) // 7).float()))[:, None]
        assert_alike(scaled_by_position(width, PositionScale(0.3, 7, offset), dtype)(x, positions), want)


def test_a_sum_may_overwrite_its_first_input():
    a, b = torch.randn(4, 33), torch.randn(4, 33)
    want, add = a + b, Combine("add", 33)
    assert add(a, b, a).data_ptr() == a.data_ptr() and torch.equal(a, want)


@DTYPES
def test_features_are_scaled_by_a_number_each(dtype):
    x, factors = strided(6, 33, dtype), torch.randn(33).to(dtype)
    assert_alike(Combine("times", 33)(x, factors.expand(6, -1)), x.float() * factors.float())


def test_far_values_of_gates_and_caps_are_their_limits():
    far = torch.tensor([[-1e38, -200.0, 200.0, 1e38]])
    ones = torch.ones_like(far)
    assert Combine("gate", 4)(ones, far).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    capped = Combine("capped", 4, factor=30.0)(far)[0].tolist()
    assert capped == pytest.approx([-30.0, -29.9, 29.9, 30.0], abs=0.1) and capped[0] == -30.0 and capped[3] == 30.0


@DTYPES
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("by_head", [False, True])
def test_norms_of_rows_and_of_heads(dtype, kind, heads, by_head):
    size, eps = 24, 1e-5
    x = strided(6, heads * size, dtype)
    weight = torch.randn(heads, size) if by_head else torch.randn(size)
    bias = torch.randn_like(weight) if kind == "layer" else None
    op = Norm(kind, "n", size, eps, bias=bias is not None, by_head=heads if by_head else 0)
    split = x.float().reshape(6, heads, size)
    want = rms_norm(split, weight, eps) if kind == "rms" else layer_norm(split, weight, bias, eps)
    assert_alike(head_norms(op, heads * size, weight, bias, dtype)(x), want.flatten(1))


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 12, 16])
def test_rotations_of_heads(dtype, interleaved, rotary_dim):
    rows, heads, dim = 5, 3, 16
    x = strided(rows, heads * dim, dtype)
    angles = torch.randn(rows, 1, rotary_dim // 2)
    turn = rotate_interleaved if interleaved else rotate
    want = turn(x.float().reshape(rows, heads, dim), angles.cos(), angles.sin()).flatten(1)
    assert_alike(rotated_heads(heads * dim, dim, rotary_dim, interleaved, dtype)(x, angles.cos(), angles.sin()), want)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_may_begin_inside_of_a_head(dtype, interleaved):
    rows, heads, dim, start, rotary_dim = 5, 3, 20, 6, 8
    x, angles = strided(rows, heads * dim, dtype), torch.randn(rows, 1, rotary_dim // 2)
    split, turn = x.float().reshape(rows, heads, dim), rotate_interleaved if interleaved else rotate
    want = torch.cat((split[..., :start], turn(split[..., start:], angles.cos(), angles.sin())), -1).flatten(1)
    rotated = rotated_heads(heads * dim, dim, rotary_dim, interleaved, dtype, start)
    assert_alike(rotated(x, angles.cos(), angles.sin()), want)


@DTYPES
def test_keys_that_values_are_a_part_of_are_written_alone(dtype):
    keys = torch.zeros(4, 8, 1, 6, dtype=dtype)
    cache, k, slots = LayerCache(keys, keys[..., :4], PlainFormat()), strided(2, 6, dtype), torch.tensor([11, 3])
    write_kv(k, None, slots, cache)
    assert torch.equal(keys.view(32, 6)[slots], k) and int((keys.view(32, 6) != 0).any(1).sum()) == 2


@DTYPES
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype):
    shape = (4, 8, 2, 6)  # blocks, tokens, heads, dim
    cache = LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), PlainFormat())
    k, v, slots = strided(3, 12, dtype, 1), strided(3, 12, dtype, 2), torch.tensor([30, 0, 9])
    write_kv(k, v, slots, cache)
    for stored, given in ((cache.k, k), (cache.v, v)):
        flat = stored.view(32, 12)
        assert torch.equal(flat[slots], given)
        assert int((flat != 0).any(1).sum()) == 3
