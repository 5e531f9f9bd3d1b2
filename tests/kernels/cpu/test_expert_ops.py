"""Experts are chosen and mixed in C++ as in torch."""

import pytest
import torch

from engine.contracts.graph import Builder
from engine.contracts.ops import Experts, Gated, LinearPart, Route
from engine.kernels.cpu import expert_ops
from engine.kernels.cpu.linear.float_linear import pack_float
from engine.kernels.torch.experts import mixed_by_torch, route
from engine.kernels.torch.reference import activated
from tests.needs import needs_compiler

pytestmark = needs_compiler
ROUTES = {
    "softmax": Route(12, 3),
    "softmax, renormalized": Route(12, 4, renormalize=True),
    "of those chosen": Route(12, 4, "logits"),
    "one": Route(12, 1, "logits"),
    "all": Route(12, 12, "sigmoid"),
    "sigmoid, corrected, scaled": Route(12, 3, "sigmoid", renormalize=True, scale=2.5, correction="c"),
    "sigmoid of the largest logits": Route(12, 2, "sigmoid"),
    "scaled by expert": Route(12, 3, renormalize=True, expert_scale="s"),
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
    scale = torch.rand(12, generator=generator) + 0.5 if op.expert_scale else None
    ids, weights = expert_ops.ChooseExperts(op, router, bias, correction, dtype, scale)(x)
    want_ids, want = route(op, torch.nn.functional.linear(x.float(), router, bias), correction, scale)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


PLAIN = Gated("silu")
GATES = {"plain": PLAIN, "clamped": Gated("silu", limit=0.7, alpha=1.702, offset=1.0), "cut": Gated("gelu_tanh", 0.5)}


def experts(dtype, gated=PLAIN, bias=False, **options):
    """Six experts, 64 -> 88 -> 64, and their layers."""
    b, inner = Builder(), 96 if dtype == torch.bfloat16 else 88
    parts = LinearPart("e.{}.gate", inner, bias), LinearPart("e.{}.up", inner, bias)
    b.experts(b.input(64), b.input(6), Route(6, 2), parts, LinearPart("e.{}.down", 64, bias), gated, **options)
    op = next(node.op for node in b.graph().nodes if isinstance(node.op, Experts))
    generator = torch.Generator().manual_seed(5)

    def layer(spec):
        weight = 0.2 * torch.randn(spec.out_features, spec.in_features, generator=generator)
        biases = torch.randn(spec.out_features, generator=generator) if bias else None
        return pack_float(spec, weight.to(dtype), biases)

    return op, [(layer(up), layer(down)) for up, down in op.each]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("adds", ["nothing", "a residual", "in place"])
def test_experts_are_mixed_as_by_torch(dtype, rows, adds):
    check_mixture(dtype, rows, adds, PLAIN, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES)
def test_gates_and_biases_of_experts_are_those_of_torch(dtype, gate):
    check_mixture(dtype, 9, "a residual", GATES[gate], True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_experts_may_read_weighted_inputs(dtype, rows):
    check_mixture(dtype, rows, "a residual", PLAIN, True, weighs_inputs=True)


def check_mixture(dtype, rows, adds, gated, bias, **options):
    (op, pairs), generator = experts(dtype, gated, bias, **options), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, 64, generator=generator).to(dtype) for _ in range(2))
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2, generator=generator)
    mixed = mixed_by_torch(op, pairs)(x, ids, weights)
    want = mixed if adds == "nothing" else residual + mixed
    given = (None, None) if adds == "nothing" else (residual, residual if adds == "in place" else None)
    got = expert_ops.MixExperts(op, pairs, dtype)(x, ids, weights, *given)
    assert (got.data_ptr() == residual.data_ptr()) == (adds == "in place")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("act", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_experts_in_torch_do_what_the_op_says(act, weighs_inputs):
    """With an activation that layers lack, and with weights on what experts read."""
    op, pairs = experts(torch.float32, Gated(act), weighs_inputs=weighs_inputs)
    generator = torch.Generator().manual_seed(2)
    x, weights = torch.randn(5, 64, generator=generator), torch.rand(5, 2, generator=generator) + 0.5
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(5)])
    want = torch.zeros(5, 64)
    for row, k in ((row, k) for row in range(5) for k in range(2)):
        gate_up, down = pairs[ids[row, k]]
        read = x[row] * weights[row, k] if weighs_inputs else x[row]
        gate, up = gate_up.reference(read[None]).chunk(2, dim=-1)
        made = down.reference(activated(gate, act) * up)[0]
        want[row] += made if weighs_inputs else made * weights[row, k]
    torch.testing.assert_close(mixed_by_torch(op, pairs)(x, ids, weights), want, rtol=1e-4, atol=1e-4)


def test_sigmoids_that_are_alike_do_not_hide_the_largest_logits():
    """As many as all of 17 and more have a sigmoid of 1."""
    op, router = Route(12, 2, "sigmoid"), torch.linspace(20.0, 42.0, 12)[:, None]
    ids, weights = expert_ops.ChooseExperts(op, router, None, None, torch.float32)(torch.ones(1, 1))
    assert ids.tolist() == route(op, router.T, None)[0].tolist() == [[11, 10]]
    assert weights.tolist() == [[1.0, 1.0]]


def test_weights_may_be_scaled_by_expert():
    op, logits, scale = Route(12, 3, renormalize=True, expert_scale="s"), torch.randn(5, 12), torch.rand(12)
    ids, weights = route(op, logits, None, scale)
    plain = route(op, logits, None)
    assert torch.equal(ids, plain[0]) and torch.equal(weights, plain[1] * scale[ids])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_token_gets_does_not_depend_on_others_and_threads(threads):
    (op, pairs), generator = experts(torch.bfloat16), torch.Generator().manual_seed(3)
    mix, x = expert_ops.MixExperts(op, pairs, torch.bfloat16), torch.randn(5, 64, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(5)])
    weights, before = torch.rand(5, 2, generator=generator), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = mix(x, ids, weights, None, None)
    finally:
        torch.set_num_threads(before)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(together[one], mix(x[one], ids[one], weights[one], None, None))


def test_experts_that_were_not_chosen_are_not_read():
    op, pairs = experts(torch.float32)
    for number in (0, 1, 2, 4):
        for layer in pairs[number]:
            layer.tensors["weight"].fill_(float("nan"))
    mix, x = expert_ops.MixExperts(op, pairs, torch.float32), torch.randn(3, 64)
    assert bool(mix(x, torch.tensor([[3, 5]] * 3), torch.rand(3, 2), None, None).isfinite().all())
