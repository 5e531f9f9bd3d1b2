"""The skinny kernels compute what plain torch does, in every format, over odd shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.triton.launch import Launch, NormWeight, SkinnyLinear
from tests.kernels.triton.formats import FORMATS

ROWS = (1, 2, 3, 7, 16)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Accepted error as a share of the largest element: a few roundings of the dtype."""
EPS = 1e-5


class Case:
    """One layer with random weights, and the float32 result it should have. Its tensors are surrounded by NaN."""

    def __init__(
        self, device: str, rows: int, out_features: int, in_features: int, dtype: str = "float32",
        weights: str = "plain", bias: bool = False, norm: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.dtype = getattr(torch, dtype)
        self.device = device
        weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
        offset = torch.randn(out_features, generator=generator).to(self.dtype) if bias else None
        packed = FORMATS[weights](weight, offset, self.dtype)
        x = torch.randn(rows, in_features, generator=generator).to(self.dtype)
        norm_weight = 0.5 + torch.rand(in_features, generator=generator)
        normed = rms_norm(x.float(), norm_weight, EPS) if norm else x.float()
        self.want = F.linear(normed, packed.dense, None if offset is None else offset.float()).to(device)
        self.x = surrounded(x, device)
        input_norm = NormWeight(norm_weight.to(device), EPS) if norm else None
        loader = moved(packed.loader, device)
        self.linear = SkinnyLinear(Launch.on(device), loader, in_features, out_features, input_norm)
        self.tolerance = TOLERANCE[dtype]

    def check(self, got: Tensor, want: Tensor | None = None) -> None:
        want = self.want if want is None else want
        assert got.shape == want.shape and got.isfinite().all()
        assert float((got.float() - want).abs().max()) <= self.tolerance * max(1.0, float(want.abs().max()))


def surrounded(x: Tensor, device: str) -> Tensor:
    """``x`` as a view, with rows of NaN before and after it and NaN between its rows."""
    store = torch.full((x.shape[0] + 2, x.shape[1] + 8), float("nan"), dtype=x.dtype, device=device)
    view = store[1:-1, : x.shape[1]]
    view.copy_(x)
    return view


def moved(loader: TileLoader, device: str) -> TileLoader:
    names = ("weight", "scale", "zero", "channel_scale", "bias")
    tensors = (getattr(loader, name) for name in names)
    return TileLoader(
        loader.load_tile, *(None if t is None else t.to(device) for t in tensors), group_size=loader.group_size
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_format_is_read_as_what_it_stands_for(device: str, rows: int, weights: str, dtype: str) -> None:
    case = Case(device, rows, 28, 416, dtype, weights, bias=True)
    case.check(case.linear.store(case.x))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (7, 96), (50, 32), (9, 2080)])
@pytest.mark.parametrize("rows", [1, 5])
def test_sizes_need_not_be_multiples_of_a_tile(
    device: str, rows: int, out_features: int, in_features: int, weights: str
) -> None:
    case = Case(device, rows, out_features, in_features, weights=weights)
    case.check(case.linear.store(case.x))


@pytest.mark.parametrize("in_features", [5, 17, 100, 1025])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plain_weight_may_have_any_input_size(device: str, rows: int, in_features: int) -> None:
    case = Case(device, rows, 20, in_features)
    case.check(case.linear.store(case.x))


@pytest.mark.parametrize("rows", [1, 4])
def test_without_a_norm_the_input_is_multiplied_as_it_is(device: str, rows: int) -> None:
    case = Case(device, rows, 24, 160, norm=False)
    case.check(case.linear.store(case.x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
def test_the_residual_is_added_to_in_place_and_rounded_once(device: str, rows: int, dtype: str) -> None:
    case = Case(device, rows, 40, 96, dtype, norm=False, bias=True)
    residual = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)
    want = residual.float() + case.want
    got = case.linear.add(case.x, residual)
    assert got is residual
    case.check(got, want)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_gate_and_up_meet_in_one_program(device: str, rows: int, dtype: str, act: str) -> None:
    case = Case(device, rows, 2 * 20, 96, dtype, bias=True)
    case.check(case.linear.gate(case.x, act), gated_activation(case.want, act))


@pytest.mark.parametrize("weights", FORMATS)
def test_gate_and_up_are_found_in_every_format(device: str, weights: str) -> None:
    case = Case(device, 1, 2 * 33, 64, weights=weights)
    case.check(case.linear.gate(case.x, "silu"), gated_activation(case.want, "silu"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_logits_are_float32(device: str, rows: int, dtype: str) -> None:
    case = Case(device, rows, 119, 64, dtype)
    logits, tokens = case.linear.logits(case.x)
    assert logits.dtype == torch.float32 and tokens is None
    case.check(logits, case.want)


@pytest.mark.parametrize("rows", ROWS)
def test_the_token_found_on_the_way_has_the_largest_logit(device: str, rows: int) -> None:
    case = Case(device, rows, 150, 64, seed=rows)
    logits, tokens = case.linear.logits(case.x, greedy=True)
    assert tokens is not None and tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("same", [(3, 5), (5, 149), (20, 149), (0, 1)])
def test_of_equal_logits_the_lowest_token_wins(device: str, rows: int, same: tuple[int, int]) -> None:
    case = Case(device, rows, 150, 64)
    weight = case.linear.loader.weight
    weight[list(same)] = 100.0 * case.x[0].sign()
    _, tokens = case.linear.logits(case.x, greedy=True)
    assert tokens is not None and int(tokens[0]) == same[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_with_broken_logits_says_so_and_its_neighbours_do_not(device: str, rows: int) -> None:
    case = Case(device, rows, 150, 64)
    case.x[0, 5] = float("nan")
    logits, tokens = case.linear.logits(case.x, greedy=True)
    assert tokens is not None and int(tokens[0]) == -1
    assert torch.equal(tokens[1:], logits[1:].argmax(-1)) and bool(logits[1:].isfinite().all())


def test_float16_does_not_overflow_between_norm_weight_and_norm(device: str) -> None:
    """x * weight passes float16's 65504 here; the normed value is ordinary."""
    for rows in (1, 4):
        case = Case(device, rows, 24, 64, "float16")
        assert case.linear.norm is not None
        big = SkinnyLinear(
            case.linear.launch, case.linear.loader, 64, 24, NormWeight(case.linear.norm.weight * 20.0, EPS)
        )
        case.check(big.store(case.x * 5000.0) / 20.0)


def test_rows_do_not_depend_on_how_many_they_are(device: str) -> None:
    case = Case(device, 16, 48, 200)
    whole = case.linear.store(case.x)
    for rows in (2, 5, 8):
        assert float((case.linear.store(case.x[:rows]) - whole[:rows]).abs().max()) <= 1e-5
