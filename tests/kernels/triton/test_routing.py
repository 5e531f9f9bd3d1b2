"""Experts are chosen by Triton kernels as by torch: the same ids, and weights within rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.contracts.ops import HeldExperts, Route
from engine.kernels.torch.collectives import own_ids
from engine.kernels.torch.experts import route
from engine.kernels.torch.norms import rms_norm
from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.routing import ExpertChoice
from engine.kernels.triton.tiles import MAX_ROWS

ROUTES = {
    "softmax": Route(12, 3),
    "softmax, renormalized": Route(12, 4, renormalize=True),
    "of those chosen": Route(12, 4, "logits"),
    "one": Route(12, 1, "logits"),
    "all": Route(12, 12, "sigmoid"),
    "sigmoid, corrected, scaled": Route(12, 3, "sigmoid", renormalize=True, scale=2.5, correction="c"),
    "scaled by expert": Route(12, 3, renormalize=True, expert_scale="s"),
    "groups by best": Route(12, 3, groups=4, chosen_groups=2),
    "groups by two": Route(12, 3, "sigmoid", correction="c", groups=3, chosen_groups=2, group_by="top2"),
}
SMALL_GROUP = Route(12, 4, groups=6, chosen_groups=1)
"""Of two experts, which are fewer than are chosen."""


def chooser(op: Route, device: str, seed: int = 3) -> ExpertChoice:
    generator = torch.Generator().manual_seed(seed)
    count = op.num_experts
    router, bias = torch.randn(count, 24, generator=generator), torch.randn(count, generator=generator)
    # More than any score: negative for some, so that masked experts must not win with a 0.
    correction = torch.linspace(-3.0, -1.0, count)[torch.randperm(count, generator=generator)]
    arrived = torch.zeros(MAX_ROWS, dtype=torch.int32)
    scale = torch.rand(count, generator=generator) + 0.5
    moved = [tensor.to(device) for tensor in (router, bias, correction, arrived, scale)]
    given = moved[2] if op.correction else None, moved[3], moved[4] if op.expert_scale else None
    return ExpertChoice(Launch.on(device), op, moved[0], moved[1], *given)


@pytest.mark.parametrize(
    ("name", "rows"), [(name, 1) for name in ROUTES] + [("softmax", 5), ("groups by two", MAX_ROWS + 3)]
)
def test_ids_and_weights_are_those_of_torch(device, name, rows):
    choose, dtype = chooser(ROUTES[name], device), torch.float32 if rows == 1 else torch.bfloat16
    x = torch.randn(rows, 27, generator=torch.Generator().manual_seed(rows)).to(device, dtype)[:, 2:26]
    for _ in range(2):  # what has arrived is forgotten
        ids, weights = choose(x)
        logits = F.linear(x.float(), choose.router, choose.bias)
        want_ids, want = route(choose.op, logits, choose.correction, choose.expert_scale)
        assert torch.equal(ids, want_ids) and not choose.arrived.any()
        torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [2, MAX_ROWS + 3])
def test_ids_of_a_rank_say_which_of_its_own_experts(device, rows):
    """Others are -1; weights, and what they are scaled by, are those of all experts."""
    choose = chooser(ROUTES["scaled by expert"], device)
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows)).to(device)
    ids, weights = choose(x)
    for numbers in (range(5), (5,), (0, 3, 4, 11)):
        here, same = replace(choose, own=own_ids(HeldExperts(tuple(numbers), 12), device))(x)
        want = torch.full_like(ids, -1)
        for i, number in enumerate(numbers):
            want[ids == number] = i
        assert (want >= 0).any() and torch.equal(here, want)
        assert torch.equal(same, weights)


@pytest.mark.parametrize("name", ["softmax", "of those chosen", "sigmoid, corrected, scaled", "groups by two"])
def test_of_equal_logits_the_lowest_ids_are_chosen(device, name):
    choose = chooser(ROUTES[name], device)
    if choose.correction is not None:
        choose.correction.zero_()
    ids, weights = choose.of_logits(torch.zeros(2, 12, device=device))
    assert ids.tolist() == [list(range(choose.op.top_k))] * 2
    assert torch.equal(weights, weights[:1, :1].expand_as(weights))


def test_sigmoids_that_are_alike_do_not_hide_the_largest_logits(device):
    ids, weights = chooser(Route(12, 2, "sigmoid"), device).of_logits(
        torch.linspace(20.0, 42.0, 12, device=device)[None]
    )
    assert ids.tolist() == [[11, 10]] and weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("op", [ROUTES["softmax"], ROUTES["groups by two"], SMALL_GROUP], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_whatever_the_logits_are_ids_are_different_experts(device, op, value):
    choose = chooser(op, device)
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    logits[0], logits[1, ::2], logits[2, 5] = value, value, value
    for row in choose.of_logits(logits.to(device))[0].tolist():
        assert len(set(row)) == choose.op.top_k and all(0 <= number < 12 for number in row)


@pytest.mark.parametrize("op", [Route(160, 6, groups=8, chosen_groups=3), Route(256, 8, "sigmoid", groups=8,
                         chosen_groups=4, group_by="top2"), Route(512, 10, renormalize=True)], ids=str)  # fmt: skip
def test_real_numbers_of_experts(device, op):
    logits = torch.randn(2, op.num_experts, generator=torch.Generator().manual_seed(7)).to(device)
    ids, weights = chooser(op, device).of_logits(logits)
    want_ids, want = route(op, logits, None)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_before_the_router_is_rounded_as_torch_rounds_it(device, dtype):
    """(Triton's interpreter cuts bfloat16 off instead.)"""
    choose = chooser(ROUTES["softmax"], device)
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(4, 24, generator=generator) * 9.0, torch.rand(24, generator=generator) + 0.5
    x, weight = x.to(device, dtype), weight.to(dtype).float().to(device)
    ids, weights = choose.of_few(x, NormWeight(weight, 1e-5))
    want_ids, want = choose(rms_norm(x, weight, 1e-5))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)
