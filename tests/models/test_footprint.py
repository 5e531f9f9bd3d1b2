"""What a step reads of the weights follows from the graph."""

import pytest

from engine.contracts.graph import Builder
from engine.contracts.ops import Gated, LinearPart, Route
from engine.models.footprint import mixtures


def graph(layers_with_experts):
    """Two layers of 8 features: a linear layer of 64 weights each, in some beside experts of 96 weights."""
    b = Builder()
    x = b.embed("embed", 16, 8)
    for i in range(2):
        with b.layer(x):
            y = b.linear(x, LinearPart(f"{i}.o", 8))
            if i in layers_with_experts:
                parts = LinearPart("e.{}.gate", 4), LinearPart("e.{}.up", 4)
                logits = b.router(x, f"{i}.router", 6)
                y = b.experts(y, logits, Route(6, 2), parts, LinearPart("e.{}.down", 8), Gated("silu"))
            x = b.add(x, y)
    b.lm_head(x, "head", 16)
    return b.graph()


def test_alike_mixtures_are_one():
    (found,) = mixtures(graph({0, 1}))
    assert (found.num_experts, found.top_k) == (6, 2)
    experts, others = 2 * 2 * 96, 2 * 64 + 128
    assert found.share == pytest.approx(experts / (experts + others))


def test_a_model_without_experts_has_no_mixture():
    assert mixtures(graph(set())) == ()
