"""Cuts of linear layers fit together, or ranks refuse to compute the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.contracts.graph import Builder, Graph, Shard, Value
from engine.contracts.ops import LinearPart, Norm, RopeFacts
from engine.models.sharding import check_cuts, cut_problems, cut_values

Change = Callable[[Builder, Value], Value]


def layer(qkv: Shard = "out", out: Shard = "in", change: Change = lambda b, q: q) -> Graph:
    """``change`` is done to the queries."""
    b = Builder()
    x = b.embed("e", 64, 16)
    with b.layer(x):
        q, k, v = b.linear(b.rms_norm(x, "n", 1e-5), *(LinearPart(name, 16) for name in "qkv"), shard=qkv)
        a = b.attention(*b.rope(change(b, q), k, RopeFacts(), 8), v, 8)
        x = b.add(x, b.linear(a, LinearPart("o", 16), shard=out))
    b.soft_cap(b.lm_head(x, "head", 64), 30.0)
    return b.graph()


def test_each_rank_has_its_part_from_the_first_cut_to_the_second() -> None:
    graph = layer()
    nodes = graph.layers[0].nodes
    parted = {number for node in nodes[1:-2] for number in node.outputs}  # projections, rotation, attention
    assert cut_values(graph) == parted and list(cut_problems(graph)) == []
    check_cuts(graph, tp=2)


@pytest.mark.parametrize("change", [lambda b, q: b.rms_norm(q, "heads", 1e-5, size=8), lambda b, q: b.scale_by(q, "s")])
def test_heads_are_normed_and_scaled_where_they_are(change: Change) -> None:
    graph = layer(change=change)
    assert list(cut_problems(graph)) == []
    check_cuts(graph, tp=2)


def test_a_function_may_be_computed_of_some_features_on_each_rank() -> None:
    check_cuts(layer(change=lambda b, q: b.torch_function("m:f", q, size=16, by_feature=True)), tp=2)


BROKEN: dict[str, tuple[Graph, str]] = {
    "outputs cut twice": (layer(out="out"), 'linear o: expected shard="in" of what shard="out" made'),
    "inputs never cut": (layer(out="none"), 'linear o: expected shard="in" of what shard="out" made'),
    "inputs cut of a whole value": (layer(qkv="in"), 'linear q: expected shard="in" of what shard="out" made'),
    "attention of whole heads": (layer(qkv="none", out="none"), "KVWrite: expected queries, keys and values"),
    "experts chosen by a part": (
        layer(change=lambda b, q: b.add(q, b.linear(b.router(q, "r", 4), LinearPart("p", 16), shard="out"))),
        "Router: expected a value that every rank has whole",
    ),
    "a slice of a part": (layer(change=lambda b, q: b.slice(q, 0, 16)), "Slice: expected a value that every rank has"),
    "a part scaled by numbers of all features": (
        layer(change=lambda b, q: b.scale_by(q, "s", by_feature=True)),
        "ScaleBy: expected a value that every rank has",
    ),
    "a function of all features, of a part of them": (
        layer(change=lambda b, q: b.torch_function("m:f", q, size=16)),
        "torch function m:f: expected values that every rank has whole, or a function with by_feature",
    ),
    "queries alone whole": (
        layer(change=lambda b, q: b.linear(q, LinearPart("again", 16), shard="in")),
        "Rope: expected inputs that are all whole or all shared out",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_cuts_that_do_not_fit_are_named(name: str) -> None:
    graph, said = BROKEN[name]
    assert next(cut_problems(graph)).startswith(said)
    with pytest.raises(ValueError, match=r"^parallelism.tp=2: the model cannot be split: "):
        check_cuts(graph, tp=2)
    check_cuts(graph, tp=1)


def test_a_norm_over_what_ranks_share_out_is_refused_for_several_ranks() -> None:
    """The architecture is right; ranks would have to exchange their sums of squares."""
    graph = layer(change=lambda b, q: b.rms_norm(q, "whole", 1e-5))
    assert any(isinstance(node.op, Norm) and node.op.name == "whole" for node in graph.nodes)
    assert list(cut_problems(graph)) == []
    check_cuts(graph, tp=1)
    with pytest.raises(ValueError, match="norm whole: over what ranks share out"):
        check_cuts(graph, tp=2)


def test_one_tensor_of_several_projections_is_refused_for_several_ranks() -> None:
    """Each rank's part of it is not one stretch."""
    b = Builder()
    x = b.embed("e", 64, 16)
    with b.layer(x):
        q, k, v = b.split(x, LinearPart("qkv", 48, slices=(16, 16, 16)), shard="out")
        x = b.add(x, b.linear(b.attention(q, k, v, 8), LinearPart("o", 16), shard="in"))
    b.lm_head(x, "head", 64)
    check_cuts(b.graph(), tp=1)
    with pytest.raises(ValueError, match="linear qkv: one tensor of several projections"):
        check_cuts(b.graph(), tp=2)


def test_latent_attention_is_refused_for_several_ranks() -> None:
    b = Builder()
    x = b.embed("e", 64, 16)
    with b.layer(x):
        q, k = b.linear(x, LinearPart("q", 32), shard="none"), b.linear(x, LinearPart("k", 8))
        x = b.add(x, b.linear(b.latent_attention(q, k, 4, scale=1.0), LinearPart("o", 16)))
    b.lm_head(x, "head", 64)
    check_cuts(b.graph(), tp=1)
    with pytest.raises(ValueError, match="cannot be split"):
        check_cuts(b.graph(), tp=2)
