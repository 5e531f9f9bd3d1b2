"""Mixtures of experts by Triton kernels are what plain torch makes of them, in every format of weights."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import Act, Gated
from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated
from engine.kernels.triton import mixture
from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.mixture import Mixture
from engine.kernels.triton.tiles import GROUPED_ROWS
from tests.kernels.triton.formats import FORMATS
from tests.kernels.triton.test_linear import TOLERANCE, moved

EXPERTS, TOP_K, IN, SIZE, OUT = 6, 2, 64, 40, 96
"""``SIZE`` fills no tile."""
SILU = Gated("silu")


class Case:
    """A layer of experts, tokens, and what they should come to."""

    def __init__(
        self, device: str, tokens: int, weights: str = "plain", dtype: str = "float32", seed: int = 0,
        gated: Gated = SILU, bias: bool = False, weighs_inputs: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device, size = getattr(torch, dtype), device, SIZE if weights != "int4" else 64
        up, down = (
            torch.randn(EXPERTS * rows, columns, generator=generator) * columns**-0.5
            for rows, columns in ((2 * size, IN), (OUT, size))
        )
        self.gated, rows = gated, (len(up), len(down))
        self.biases = [torch.randn(count, generator=generator) if bias else torch.zeros(count) for count in rows]
        given = self.biases if bias else (None, None)
        packed = [FORMATS[weights](weight, one, self.dtype) for weight, one in zip((up, down), given, strict=True)]
        self.dense = [one.dense.view(EXPERTS, -1, one.dense.shape[1]) for one in packed]
        loaders = (moved(one.loader, device) for one in packed)
        self.mixture = Mixture(Launch.on(device), EXPERTS, TOP_K, IN, size, OUT, *loaders, gated, weighs_inputs)
        self.x = torch.randn(tokens, IN + 8, generator=generator).to(self.dtype)[:, :IN]
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
        self.shares = torch.rand(tokens, TOP_K, generator=generator)
        self.residual = torch.randn(tokens, OUT, generator=generator).to(self.dtype)
        self.tolerance = TOLERANCE[dtype]

    def want(self) -> Tensor:
        rows = []
        for token, (ids, shares) in enumerate(zip(self.ids.tolist(), self.shares, strict=True)):
            made = (self.expert(i, self.x[token].float()) for i in ids)
            if self.mixture.weighs_inputs:
                made = (self.expert(i, share * self.x[token].float()) for i, share in zip(ids, shares, strict=True))
                shares = torch.ones_like(shares)
            rows.append(sum(share * one for share, one in zip(shares, made, strict=True)))
        return torch.stack(rows)

    def expert(self, number: int, x: Tensor) -> Tensor:
        (up, down), biases = self.dense, [bias.view(EXPERTS, -1) for bias in self.biases]
        gate, up = F.linear(x, up[number], biases[0][number]).chunk(2)
        return F.linear(gated(gate, up, self.gated), down[number], biases[1][number])

    def got(self, residual: bool = False, overwrite: bool = False) -> Tensor:
        tensors = (tensor.to(self.device) for tensor in (self.x, self.ids, self.shares))
        self.given = self.residual.clone().to(self.device) if residual else None
        return self.mixture(*tensors, self.given, overwrite)

    def check(self, got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape and got.dtype == self.dtype
        gap = float((got.cpu().float() - want).abs().max())
        assert gap <= 2 * self.tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5], ids=["one by one", "sorted"])
def test_every_format(device, weights, tokens):
    case = Case(device, tokens, weights)
    case.check(case.got(), case.want())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 40], ids=["one by one", "several tiles of an expert"])
def test_every_dtype(device, dtype, tokens):
    case = Case(device, tokens, dtype=dtype)
    case.check(case.got(), case.want())


@pytest.mark.parametrize("tokens", [1, 5], ids=["one by one", "sorted"])
@pytest.mark.parametrize("act", get_args(Act))
def test_gates_of_any_activation_that_are_cut_off_and_layers_with_biases(device, tokens, act):
    """As in gpt-oss, of a limit that many pass."""
    case = Case(device, tokens, gated=Gated(act, 0.7, 1.702 if act == "silu" else 1.0, 1.0), bias=True)
    case.check(case.got(), case.want())


@pytest.mark.parametrize("tokens", [1, 5], ids=["one by one", "sorted"])
def test_experts_may_read_weighted_inputs(device, tokens):
    case = Case(device, tokens, bias=True, weighs_inputs=True)
    case.check(case.got(), case.want())


@pytest.mark.parametrize("tokens", [1, 5], ids=["one by one", "sorted"])
def test_what_enters_may_be_normed_on_the_way(device, tokens):
    case, weight = Case(device, tokens), torch.rand(IN) + 0.5
    tensors = [tensor.to(device) for tensor in (case.x, case.ids, case.shares)]
    got = case.mixture(*tensors, None, False, NormWeight(weight.to(device), 1e-5))
    case.x = rms_norm(case.x, weight, 1e-5)
    case.check(got, case.want())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_mixture_is_added_to_a_residual(device, tokens, overwrite):
    case = Case(device, tokens)
    got = case.got(residual=True, overwrite=overwrite)
    case.check(got, case.residual + case.want())
    assert (got.data_ptr() == case.given.data_ptr()) == overwrite


def test_an_expert_that_has_most_tokens_and_experts_that_have_none(device):
    case = Case(device, 35)
    case.ids[:, 0], case.ids[:, 1] = 4, torch.arange(35) % 2
    case.check(case.got(), case.want())


@pytest.mark.parametrize("weights", FORMATS)
def test_many_pairs_of_every_expert_share_larger_tiles(device, weights):
    """Two tiles of 64 pairs and more of an expert, and experts that fill none."""
    case = Case(device, 110, weights, "bfloat16")
    case.ids[:70, 0], case.ids[:70, 1] = 2, 3
    assert case.mixture._tile_rows(case.x, case.ids) == GROUPED_ROWS
    case.check(case.got(), case.want())


@pytest.mark.parametrize("tokens", [2, 40, 150])
def test_many_pairs_are_sorted_alike_by_one_kernel_and_by_torch(device, tokens, monkeypatch):
    case = Case(device, tokens)
    case.ids[tokens // 2 :, 0], case.ids[tokens // 2 :, 1] = 4, 1
    ids = case.ids.to(device)
    ours = case.mixture._tiles(ids)
    monkeypatch.setattr(mixture, "SORTED_BY_KERNEL", 0)
    order, token, first, count, expert = case.mixture._tiles(ids)
    real = expert >= 0
    assert torch.equal(ours[0], order) and torch.equal(ours[1], token) and torch.equal(ours[4], expert)
    assert torch.equal(ours[2][real], first[real]) and torch.equal(ours[3][real], count[real])
    assert not (ours[2][~real].any() or ours[3][~real].any())


def test_no_expert_but_those_chosen_is_read(device):
    case = Case(device, 1)
    case.ids[:] = torch.tensor([[1, 4]])
    others = [number for number in range(EXPERTS) if number not in (1, 4)]
    for loader in (case.mixture.gate_up, case.mixture.down):
        loader.weight.view(EXPERTS, -1)[others] = float("nan")
    case.check(case.got(), case.want())
