"""Mixtures of experts by Triton kernels are what plain torch makes of them, in every format of weights."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import Act, Cut, Gated, HeldExperts
from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated
from engine.kernels.triton import mixture
from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.mixture import Mixture
from engine.kernels.triton.tiles import GROUPED_ROWS, MAX_ROWS
from tests.kernels.triton.formats import FORMATS
from tests.kernels.triton.test_linear import TOLERANCE, moved

EXPERTS, TOP_K, IN, SIZE, OUT = 6, 2, 64, 40, 96
"""``SIZE`` fills no tile."""
SILU = Gated("silu")


class Case:
    """A layer of experts, tokens, and what they should come to. ``held``: the experts of one rank, ``None``: all."""

    def __init__(
        self, device: str, tokens: int, weights: str = "plain", dtype: str = "float32", seed: int = 0,
        gated: Gated = SILU, bias: bool = False, weighs_inputs: bool = False, held: Cut | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device, size = getattr(torch, dtype), device, SIZE if weights != "int4" else 64
        self.held = held or Cut(0, EXPERTS, EXPERTS)
        first, last, count = self.held
        up, down = (
            torch.randn(count * rows, columns, generator=generator) * columns**-0.5
            for rows, columns in ((2 * size, IN), (OUT, size))
        )
        self.gated, rows = gated, (len(up), len(down))
        biases = [torch.randn(n, generator=generator) if bias else torch.zeros(n) for n in rows]
        own = [one.view(count, -1, *one.shape[1:])[first:last].flatten(0, 1) for one in (up, down, *biases)]
        self.biases = own[2:]
        given = self.biases if bias else (None, None)
        packed = [FORMATS[weights](weight, one, self.dtype) for weight, one in zip(own[:2], given, strict=True)]
        self.dense = [one.dense.view(self.held.size, -1, one.dense.shape[1]) for one in packed]
        loaders = (moved(one.loader, device) for one in packed)
        self.mixture = Mixture(
            Launch.on(device),
            self.held.size,
            TOP_K,
            IN,
            size,
            OUT,
            *loaders,
            gated,
            weighs_inputs,
            held and HeldExperts(tuple(range(first, last)), count),
        )
        self.x = torch.randn(tokens, IN + 8, generator=generator).to(self.dtype)[:, :IN]
        self.ids = torch.stack([torch.randperm(count, generator=generator)[:TOP_K] for _ in range(tokens)])
        self.shares = torch.rand(tokens, TOP_K, generator=generator)
        self.residual = torch.randn(tokens, OUT, generator=generator).to(self.dtype)
        self.tolerance = TOLERANCE[dtype]

    def want(self) -> Tensor:
        rows = []
        for x, ids, shares in zip(self.x.float(), self.own_ids().tolist(), self.shares, strict=True):
            total = torch.zeros(OUT)
            for number, share in zip(ids, shares, strict=True):
                if number >= 0 and self.mixture.weighs_inputs:
                    total += self.expert(number, share * x)
                elif number >= 0:
                    total += share * self.expert(number, x)
            rows.append(total)
        return torch.stack(rows)

    def own_ids(self) -> Tensor:
        """Counted from this rank's first expert; -1 for one of another rank."""
        here = self.ids - self.held.start
        return torch.where((here >= 0) & (here < self.held.size), here, -1)

    def expert(self, number: int, x: Tensor) -> Tensor:
        (up, down), biases = self.dense, [bias.view(self.held.size, -1) for bias in self.biases]
        gate, up = F.linear(x, up[number], biases[0][number]).chunk(2)
        return F.linear(gated(gate, up, self.gated), down[number], biases[1][number])

    def got(self, residual: bool = False, overwrite: bool = False) -> Tensor:
        tensors = (tensor.to(self.device) for tensor in (self.x, self.own_ids(), self.shares))
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


@pytest.fixture
def poisoned():
    """New memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "held"),
    [(1, Cut(2, 4, 6)), (2, Cut(3, 16, 16)), (5, Cut(0, 1, 6)), (9, Cut(1, 6, 6))],
    ids=["one by one", "two tokens one by one", "sorted, one expert", "sorted"],
)
def test_pairs_of_other_ranks_experts_are_neither_computed_nor_added(device, tokens, held, weights, poisoned):
    """Where ranks hold some experts each, and not equally many."""
    case = Case(device, tokens, weights, bias=True, held=held)
    case.ids[0] = torch.tensor([held.start, (held.start - 1) % held.whole])
    assert (case.own_ids()[0] < 0).tolist() == [False, held.size < 15]
    case.check(case.got(residual=True), case.residual + case.want())


@pytest.mark.parametrize("tokens", [1, 5], ids=["one by one", "sorted"])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_a_rank_that_none_of_the_experts_is_on_makes_zeros(device, tokens, weighs_inputs, poisoned):
    """Also of shares that are broken: they weigh what other ranks make."""
    case = Case(device, tokens, bias=True, weighs_inputs=weighs_inputs, held=Cut(4, 6, 6))
    case.ids[:], case.shares[:] = torch.tensor([1, 3]), float("nan")
    assert not case.got().any()
    assert torch.equal(case.got(residual=True, overwrite=True), case.residual.to(device))


def test_tiles_are_as_large_as_the_pairs_of_all_ranks_fill_them(device, poisoned):
    case = Case(device, 110, dtype="bfloat16", held=Cut(2, 4, 6))
    assert case.mixture._tile_rows(case.x, case.ids) == GROUPED_ROWS
    assert case.mixture._tile_rows(case.x, case.ids[:90]) == MAX_ROWS, "not of the two experts that are here"
    case.check(case.got(), case.want())


@pytest.mark.parametrize(
    ("tokens", "held"), [(2, None), (40, None), (150, None), (40, Cut(1, 5, 6)), (40, Cut(5, 6, 6)), (3, Cut(2, 3, 6))]
)
def test_many_pairs_are_sorted_alike_by_one_kernel_and_by_torch(device, tokens, held, monkeypatch):
    """Those of other ranks' experts come last and are in no tile."""
    case = Case(device, tokens, held=held)
    case.ids[tokens // 2 :, 0], case.ids[tokens // 2 :, 1] = 4, 1
    ids = case.own_ids().to(device)
    ours = case.mixture._tiles(ids)
    monkeypatch.setattr(mixture, "SORTED_BY_KERNEL", 0)
    order, token, first, count, expert = case.mixture._tiles(ids)
    real = expert >= 0
    assert torch.equal(ours[0], order) and torch.equal(ours[1], token) and torch.equal(ours[4], expert)
    assert torch.equal(ours[2][real], first[real]) and torch.equal(ours[3][real], count[real])
    assert not (ours[2][~real].any() or ours[3][~real].any())
    assert int(ours[3].sum()) == int((ids >= 0).sum()) and (ids.flatten()[order[int(ours[3].sum()) :]] < 0).all()


def test_no_expert_but_those_chosen_is_read(device):
    case = Case(device, 1)
    case.ids[:] = torch.tensor([[1, 4]])
    others = [number for number in range(EXPERTS) if number not in (1, 4)]
    for loader in (case.mixture.gate_up, case.mixture.down):
        loader.weight.view(EXPERTS, -1)[others] = float("nan")
    case.check(case.got(), case.want())
