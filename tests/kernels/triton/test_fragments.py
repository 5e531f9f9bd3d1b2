"""Products of up to 16 rows whose weights tensor cores read in words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.triton.launch import Launch, NormWeight, SkinnyLinear
from engine.kernels.triton.quantized.loaders import tile_loader
from tests.kernels.triton.quantized_weights import WEIGHTS, Make, int4_zeros, int8_groups
from tests.kernels.triton.test_linear import surrounded
from tests.selection import few

EPS = 1e-5
KINDS: dict[str, Make] = {
    **{kind: WEIGHTS[kind] for kind in ("int4 g128", "int4 per channel", "int8", "fp8", "fp8 blocks", "mxfp4")},
    "int4 zeros g128": lambda weight, bias: int4_zeros(weight, bias, 128),
    "int8 g256": lambda weight, bias: int8_groups(weight, bias, 256),
}


class Case:
    """One layer with random weights, its input surrounded by NaN, and the result it should have."""

    def __init__(
        self, device: str, kind: str, rows: int, out: int, size: int, *, norm: bool = True, bias: bool = False
    ) -> None:
        random = torch.Generator().manual_seed(rows)
        dense = torch.randn(out, size, generator=random) * size**-0.5
        weight = KINDS[kind](dense, torch.randn(out, generator=random) if bias else None)
        x = torch.randn(rows, size, generator=random).bfloat16()
        norm_weight = (0.5 + torch.rand(size, generator=random)).bfloat16()
        normed = rms_norm(x.float(), norm_weight.float(), EPS) if norm else x.float()
        self.want = F.linear(normed, weight.dense(), weight.bias).to(device)
        self.x = surrounded(x, device)
        self.linear = SkinnyLinear(
            Launch.on(device), tile_loader(weight.to(device)), size, out,
            NormWeight(norm_weight.to(device), EPS) if norm else None,
        )  # fmt: skip
        assert self.linear._tile(self.x).in_words

    def check(self, got: Tensor, want: Tensor | None = None, tolerance: float = 1e-2) -> None:
        want = self.want if want is None else want
        assert got.shape == want.shape and bool(got.isfinite().all())
        assert float((got.float() - want).abs().max()) <= tolerance * float(want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_every_format_is_multiplied_as_what_it_stands_for(device: str, rows: int, kind: str) -> None:
    case = Case(device, kind, rows, 32, 512, norm=False, bias=True)
    case.check(case.linear.logits(case.x)[0], tolerance=1e-5)


@pytest.mark.parametrize("kind", ["int4 g128", "fp8"])
@pytest.mark.parametrize(("out", "size"), [(1, 128), (40, 896), (17, 2176)])
@pytest.mark.parametrize("rows", [3, 11])
def test_channels_and_tiles_need_not_fill_programs_and_warps(
    device: str, rows: int, out: int, size: int, kind: str
) -> None:
    case = Case(device, kind, rows, out, size)
    case.check(case.linear.logits(case.x)[0], tolerance=6e-3)
    case.check(case.linear.store(case.x))


@few(1)
@pytest.mark.parametrize("rows", [2, 16])
def test_what_follows_a_product_is_what_follows_any(device: str, rows: int) -> None:
    case = Case(device, "int4 g128", rows, 2 * 20, 256, bias=True)
    case.check(case.linear.gate(case.x, "silu"), gated_activation(case.want, "silu"), 2e-2)
    residual = torch.ones(rows, 40, dtype=torch.bfloat16, device=device)
    case.check(case.linear.add(case.x, residual), case.want + 1.0)
    logits, tokens = case.linear.logits(case.x, greedy=True)
    assert tokens is not None and torch.equal(tokens, logits.argmax(-1))


def test_a_row_has_the_same_bits_beside_any_others(device: str) -> None:
    case = Case(device, "int4 g128", 16, 48, 384)
    whole = case.linear.logits(case.x)[0]
    for rows in (1, 7, 8, 9):
        assert torch.equal(case.linear.logits(case.x[:rows])[0], whole[:rows])


def test_other_inputs_take_the_tiles(device: str) -> None:
    linear, x = (case := Case(device, "int8", 4, 32, 256)).linear, case.x
    for rows in (x.float(), x.half()):
        assert not linear._tile(rows).in_words
    plain = SkinnyLinear(linear.launch, linear.loader, 256, 32)
    wide = torch.zeros(4, 264, dtype=torch.bfloat16)
    assert plain._tile(wide[:, :256]).in_words
    assert not plain._tile(wide[:, 1:257]).in_words, "begins inside of a word"
    assert not plain._tile(torch.zeros(4, 260, dtype=torch.bfloat16)[:, :256]).in_words


@pytest.mark.parametrize(
    ("kind", "size"), [("int4 g32", 256), ("int8 zeros", 256), ("int8 groups", 256), ("int8", 192), ("mxfp4", 192)]
)
def test_formats_with_more_in_a_tile_than_one_scale_and_parts_of_tiles_take_the_tiles(kind: str, size: int) -> None:
    assert tile_loader(WEIGHTS[kind](torch.randn(32, size), None)).words is None
