"""Mixtures of experts by Triton kernels are what plain torch makes of them, in every format of weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.torch.reference import gated_activation
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.mixture import Mixture
from tests.kernels.triton.formats import FORMATS
from tests.kernels.triton.test_linear import TOLERANCE, moved

EXPERTS, TOP_K, IN, SIZE, OUT = 6, 2, 64, 40, 96
"""``SIZE`` fills no tile."""


class Case:
    """A layer of experts, tokens, and what they should come to."""

    def __init__(self, device: str, tokens: int, weights: str = "plain", dtype: str = "float32", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device, size = getattr(torch, dtype), device, SIZE if weights != "int4" else 64
        up, down = (
            torch.randn(EXPERTS * rows, columns, generator=generator) * columns**-0.5
            for rows, columns in ((2 * size, IN), (OUT, size))
        )
        packed = [FORMATS[weights](weight, None, self.dtype) for weight in (up, down)]
        self.dense = [one.dense.view(EXPERTS, -1, one.dense.shape[1]) for one in packed]
        loaders = (moved(one.loader, device) for one in packed)
        self.mixture = Mixture(Launch.on(device), EXPERTS, TOP_K, IN, size, OUT, *loaders, "silu")
        self.x = torch.randn(tokens, IN + 8, generator=generator).to(self.dtype)[:, :IN]
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
        self.shares = torch.rand(tokens, TOP_K, generator=generator)
        self.residual = torch.randn(tokens, OUT, generator=generator).to(self.dtype)
        self.tolerance = TOLERANCE[dtype]

    def want(self) -> Tensor:
        rows = []
        for token, (ids, shares) in enumerate(zip(self.ids.tolist(), self.shares, strict=True)):
            gated = (gated_activation(F.linear(self.x[token].float(), self.dense[0][i])[None], "silu") for i in ids)
            made = (F.linear(one[0], self.dense[1][i]) for i, one in zip(ids, gated, strict=True))
            rows.append(sum(share * one for share, one in zip(shares, made, strict=True)))
        return torch.stack(rows)

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


def test_no_expert_but_those_chosen_is_read(device):
    case = Case(device, 1)
    case.ids[:] = torch.tensor([[1, 4]])
    others = [number for number in range(EXPERTS) if number not in (1, 4)]
    for loader in (case.mixture.gate_up, case.mixture.down):
        loader.weight.view(EXPERTS, -1)[others] = float("nan")
    case.check(case.got(), case.want())
