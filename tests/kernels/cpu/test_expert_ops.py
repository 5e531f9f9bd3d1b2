"""Experts are chosen and mixed in C++ as in torch."""

import pytest
import torch

from engine.contracts.graph import Builder
from engine.contracts.ops import Experts, Gated, LinearPart, Route
from engine.kernels.cpu import expert_ops
from engine.kernels.cpu.linear.float_linear import pack_float
from engine.kernels.torch.experts import mixed_by_torch, route
from engine.models.required_tensors import expert_linears
from tests.needs import needs_compiler

pytestmark = needs_compiler
ROUTES = {
    "softmax": Route(12, 3),
    "softmax, renormalized": Route(12, 4, renormalize=True),
    "of those chosen": Route(12, 4, "logits"),
    "one": Route(12, 1, "logits"),
    "all": Route(12, 12, "sigmoid"),
    "sigmoid, corrected, scaled": Route(12, 3, "sigmoid", renormalize=True, scale=2.5, correction="c"),
    "groups by best": Route(12, 3, groups=4, chosen_groups=2),
    "groups by two": Route(12, 3, "sigmoid", correction="c", groups=3, chosen_groups=2, group_by="top2"),
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_weights_are_those_of_torch(name, dtype):
    op, generator = ROUTES[name], torch.Generator().manual_seed(3)
    x = torch.randn(40, 27, generator=generator).to(dtype)[:, 2:26]
    router, bias = torch.randn(12, 24, generator=generator), torch.randn(12, generator=generator)
    # More than any score: negative for some, so that masked experts must not win with a 0.
    correction = torch.linspace(-3.0, -1.0, 12)[torch.randperm(12, generator=generator)] if op.correction else None
    ids, weights = expert_ops.ChooseExperts(op, router, bias, correction, dtype)(x)
    want_ids, want = route(op, torch.nn.functional.linear(x.float(), router, bias), correction)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


def experts(dtype):
    """Six experts, 64 -> 96 -> 64, and their layers."""
    b = Builder()
    parts = LinearPart("e.{}.gate", 96), LinearPart("e.{}.up", 96)
    b.experts(b.input(64), b.input(6), Route(6, 2), parts, LinearPart("e.{}.down", 64), Gated("silu"))
    op = next(node.op for node in b.graph().nodes if isinstance(node.op, Experts))
    generator = torch.Generator().manual_seed(5)

    def layer(spec):
        weight = 0.2 * torch.randn(spec.out_features, spec.in_features, generator=generator)
        return pack_float(spec, weight.to(dtype), None)

    return op, [(layer(up), layer(down)) for up, down in expert_linears(op)]


class _OneRank:
    """Of a lowering, what experts ask for."""

    tp = 1

    @staticmethod
    def reduced(linear):
        return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("adds", ["nothing", "a residual", "in place"])
def test_few_tokens_are_mixed_as_many_are(dtype, rows, adds):
    (op, pairs), generator = experts(dtype), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, 64, generator=generator).to(dtype) for _ in range(2))
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2, generator=generator)
    mixed = mixed_by_torch(_OneRank, op, pairs)(x, ids, weights)
    want = mixed if adds == "nothing" else residual + mixed
    given = (None, None) if adds == "nothing" else (residual, residual if adds == "in place" else None)
    got = expert_ops.MixExperts(op, pairs, dtype)(x, ids, weights, *given)
    assert (got.data_ptr() == residual.data_ptr()) == (adds == "in place")
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_experts_that_were_not_chosen_are_not_read():
    op, pairs = experts(torch.float32)
    for number in (0, 1, 2, 4):
        for layer in pairs[number]:
            layer.tensors["weight"].fill_(float("nan"))
    mix, x = expert_ops.MixExperts(op, pairs, torch.float32), torch.randn(3, 64)
    assert bool(mix(x, torch.tensor([[3, 5]] * 3), torch.rand(3, 2), None, None).isfinite().all())
