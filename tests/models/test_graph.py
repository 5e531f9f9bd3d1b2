"""A builder records what it is told, and refuses what does not fit; a graph says what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.contracts.graph import Builder, Graph, KVSpec, Reach, Value
from engine.contracts.ops import (
    Add,
    Attention,
    DeltaRule,
    Embed,
    Experts,
    Gate,
    Gated,
    KVWrite,
    Linear,
    LinearPart,
    Norm,
    Rope,
    RopeFacts,
    Route,
    Scale,
    ScaleBy,
    Slice,
    SoftCap,
)

ROPE = RopeFacts()


def small() -> Graph:
    """One layer of attention and a gated MLP, 16 features in 2 heads that share one of keys and values."""
    b = Builder()
    x = b.embed("embed", 64, 16)
    with b.layer(x):
        h = b.rms_norm(x, "norm", 1e-5)
        q, k, v = b.linear(h, LinearPart("q", 16), LinearPart("k", 8), LinearPart("v", 8), shard="out")
        a = b.attention(*b.rope(q, k, ROPE, 8), v, 8, window=32)
        x = b.add(x, b.linear(a, LinearPart("o", 16), shard="in"))
        gate, up = b.linear(x, LinearPart("gate", 24), LinearPart("up", 24))
        x = b.add(x, b.linear(b.gated(gate, up, "silu"), LinearPart("down", 16)))
    b.lm_head(b.layer_norm(x, "last", 1e-6, bias=True), "head", 64, tied=True)
    return b.graph()


def kinds(nodes: Any) -> list[type]:
    return [type(node.op) for node in nodes]


def test_ops_are_recorded_in_the_order_in_which_they_are_written() -> None:
    graph = small()
    assert kinds(graph.embed.nodes) == [Embed]
    assert kinds(graph.layers[0].nodes) == [
        Norm,
        Linear,
        Rope,
        KVWrite,
        Attention,
        Linear,
        Add,
        Linear,
        Gated,
        Linear,
        Add,
    ]
    assert kinds(graph.head.nodes) == [Norm, Linear]
    assert list(graph.nodes) == [*graph.embed.nodes, *graph.layers[0].nodes, *graph.head.nodes]


def test_every_op_reads_values_that_were_made_before_it() -> None:
    graph = small()
    made = set(graph.inputs)
    for node in graph.nodes:
        assert made.issuperset(node.inputs) and made.isdisjoint(node.outputs)
        made.update(node.outputs)
    assert sorted(made) == list(range(len(graph.sizes)))


def test_a_graph_knows_its_edges() -> None:
    graph = small()
    assert graph.inputs == (0,) and graph.sizes[0] == 1
    assert graph.embedding == Embed("embed", 64, 16)
    assert graph.lm_head.tied and graph.lm_head.spec.parts == (LinearPart("head", 64),)
    assert graph.lm_head.spec.kind == "head" and graph.lm_head.spec.shard == "out"
    assert graph.layers[0].residual == graph.embed.nodes[0].outputs[0]
    assert graph.hidden == graph.layers[0].nodes[-1].outputs[0] and graph.hidden_size == 16


def test_the_hidden_states_of_layers_without_a_head_are_what_the_last_one_makes() -> None:
    b = Builder()
    x, other = b.input(16), b.input(8)
    with b.layer(x):
        x = b.add(x, b.linear(other, LinearPart("fc", 16)))
    graph = b.graph()
    assert (graph.inputs, graph.hidden, graph.hidden_size) == ((0, 1), x.number, 16)
    assert graph.embed.nodes == graph.head.nodes == ()


def test_sizes_are_those_of_the_values() -> None:
    graph = small()
    q, k, v = graph.layers[0].nodes[1].outputs
    assert [graph.sizes[number] for number in (q, k, v)] == [16, 8, 8]
    assert graph.sizes[graph.head.nodes[-1].outputs[0]] == 64


def test_each_attention_has_a_cache_of_its_own() -> None:
    b = Builder()
    x = b.embed("embed", 64, 16)
    for window, chunk in ((None, None), (8, None), (None, 8)):
        with b.layer(x):
            q, k, v = b.linear(x, *(LinearPart(name, 16) for name in "qkv"))
            x = b.attention(q, k, v, 8, window=window, chunk=chunk, scale=0.5, soft_cap=50.0)
    graph = b.graph()
    assert graph.caches == (KVSpec(2, 8), KVSpec(2, 8, Reach("window", 8)), KVSpec(2, 8, Reach("chunked", 8)))
    assert [node.cache for node in graph.nodes if isinstance(node.op, KVWrite | Attention)] == [0, 0, 1, 1, 2, 2]
    assert [node.cache for node in graph.nodes if isinstance(node.op, Linear)] == [None] * 3
    assert graph.layers[1].nodes[-1].op == Attention(2, 2, 8, 0.5, 8, 50.0)
    assert graph.layers[2].nodes[-1].op == Attention(2, 2, 8, 0.5, soft_cap=50.0, chunk=8)


def test_a_later_layer_may_attend_to_the_cache_of_an_earlier_one() -> None:
    """And sees what that one sees, with as many heads as it likes."""
    b = Builder()
    x = b.embed("embed", 64, 16)
    with b.layer(x):
        q, k, v = b.linear(x, *(LinearPart(name, 16) for name in "qkv"))
        first = b.attention(q, k, v, 8, window=8, soft_cap=50.0)
        x = b.add(x, first)
    with b.layer(x):
        second = b.attention_to(first, b.linear(x, LinearPart("wide", 32)), scale=1.0)
        x = b.add(x, b.linear(second, LinearPart("o", 16)))
    graph = b.graph()
    assert second.size == 32 and graph.caches == (KVSpec(2, 8, Reach("window", 8)),)
    assert [node.cache for node in graph.nodes if isinstance(node.op, Attention)] == [0, 0]
    assert next(node.op for node in graph.layers[1].nodes if node.cache == 0) == Attention(4, 2, 8, 1.0, 8)


def test_layers_may_read_more_of_what_is_before_them_than_the_residual_stream() -> None:
    b = Builder()
    x = b.embed("embed", 64, 16)
    own = b.embed("own", 64, 8)
    for i in range(2):
        with b.layer(x):
            x = b.scale_by(b.add(x, b.linear(b.slice(own, 4 * i, 4 * i + 4), LinearPart(f"{i}", 16))), f"{i}.scale")
    graph = b.graph()
    assert graph.entering == (graph.layers[0].residual, own.number) and graph.embedding.name == "embed"
    found = [node.op for node in graph.layers[1].nodes]
    assert found[0] == Slice(4, 8) and found[-1] == ScaleBy("1.scale", 1)


def test_scores_are_scaled_by_the_root_of_the_head_size_unless_said_otherwise() -> None:
    (op,) = (node.op for node in small().nodes if isinstance(node.op, Attention))
    assert op.scale == 8**-0.5


def test_what_changes_nothing_is_not_recorded() -> None:
    b = Builder()
    x = b.input(16)
    assert b.scale(x, 1.0) is x and b.soft_cap(x, None) is x
    assert not list(b.graph().nodes)
    b.soft_cap(b.scale(x, 2.0), 30.0)
    assert [node.op for node in b.graph().nodes] == [Scale(2.0), SoftCap(30.0)]


def test_one_part_is_one_value_and_several_are_several() -> None:
    b = Builder()
    x = b.input(16)
    assert isinstance(b.linear(x, LinearPart("one", 8)), Value)
    assert [value.size for value in b.linear(x, LinearPart("one", 8), LinearPart("two", 24))] == [8, 24]


def test_a_norm_of_a_size_is_one_of_heads() -> None:
    b = Builder()
    x = b.input(16)
    assert b.rms_norm(x, "heads", 1e-5, size=8, offset=1.0).size == 16
    assert b.layer_norm(x, None, 1e-5).size == 16
    heads, whole = (node.op for node in b.graph().nodes)
    assert (heads, whole) == (Norm("rms", "heads", 8, 1e-5, 1.0), Norm("layer", None, 16, 1e-5))


def test_heads_may_have_a_norm_each() -> None:
    b = Builder()
    b.layer_norm(b.input(16), "heads", 1e-5, size=8, by_head=True)
    (op,) = (node.op for node in b.graph().nodes)
    assert op == Norm("layer", "heads", 8, 1e-5, by_head=2)


def test_slices_of_a_fused_projection_are_values() -> None:
    b = Builder()
    x = b.input(16)
    assert [value.size for value in b.split(x, LinearPart("qkv", 40, slices=(24, 8, 8)))] == [24, 8, 8]
    more = b.linear(x, LinearPart("gate_up", 32, slices=(16, 16)), LinearPart("one", 8))
    assert [value.size for value in more] == [16, 16, 8]


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_window_or_chunk_that_holds_every_sequence_is_none(kind: str) -> None:
    def windows(positions: int) -> list[int | None]:
        b = Builder()
        b.positions(positions)
        x = b.input(8)
        for tokens in (31, 32, None):
            b.attention(x, x, x, 8, **{kind: tokens})
        return [cache.reach.tokens for cache in b.graph().caches]

    assert windows(32) == [31, None, None] and windows(33) == [31, 32, None]
    assert windows(0) == [31, 32, None], "not said"


def test_experts_are_chosen_and_then_computed() -> None:
    b = Builder()
    x = b.input(16)
    made = experts(b, x, b.router(x, "router", 4))
    _, route, computed = b.graph().nodes
    assert made.size == 16 and route.op == Route(4, 2) and isinstance(computed.op, Experts)
    assert computed.inputs == (x.number, *route.outputs)
    assert [b.graph().sizes[number] for number in route.outputs] == [2, 2]
    assert (computed.op.gate_up.kind, computed.op.gate_up.shard, computed.op.down.shard) == ("gate_up", "out", "in")


def test_a_gate_is_of_every_feature_or_of_all() -> None:
    b = Builder()
    x = b.input(16)
    assert b.gate(x, x).size == b.gate(x, b.linear(x, LinearPart("gate", 1))).size == 16
    assert [type(node.op) for node in b.graph().nodes] == [Gate, Linear, Gate]


def test_the_tokens_are_embedded_from_one_input_however_often() -> None:
    b = Builder()
    first, second = b.embed("first", 64, 16), b.embed("second", 64, 8)
    graph = b.graph()
    assert graph.inputs == (0,) and [node.inputs for node in graph.nodes] == [(0,), (0,)]
    assert (first.size, second.size) == (16, 8)


def test_graphs_of_the_same_ops_are_equal() -> None:
    assert small() == small()


def experts(b: Builder, x: Value, logits: Value, top_k: int = 2, up: int = 24, groups: int = 1) -> Value:
    """Two of four."""
    parts = LinearPart("{}.gate", 24), LinearPart("{}.up", up)
    return b.experts(x, logits, Route(4, top_k, groups=groups), parts, LinearPart("{}.down", 16), Gated("silu"))


def foreign(size: int) -> Value:
    """Of another builder, which has made many."""
    other = Builder()
    return [other.input(size) for _ in range(9)][-1]


DELTA_RULE = DeltaRule(2, 8, 2, 12, "rate", "bias")

REFUSED: dict[str, tuple[Callable[[Builder, Value, Value], Any], str]] = {
    "features that are no heads, normed": (
        lambda b, x, y: b.rms_norm(x, "n", 1e-5, size=5),
        "norm n: 16 features are not heads of 5",
    ),
    "features that are no heads, normed otherwise": (
        lambda b, x, y: b.layer_norm(x, "n", 1e-5, size=32),
        "16 features are not heads of 32",
    ),
    "features that are no heads, rotated": (
        lambda b, x, y: b.rope(x, y, ROPE, 16),
        "rope: 24 features are not heads of 16",
    ),
    "features that are no heads, attended": (
        lambda b, x, y: b.attention(x, x, x, 12),
        "attention: 16 features are not heads of 12",
    ),
    "heads of no size": (lambda b, x, y: b.rope(x, x, ROPE, 0), "16 features are not heads of 0"),
    "query heads that key heads do not divide": (
        lambda b, x, y: b.attention(x, y, y, 8),
        "2 query, 3 key and 3 value heads",
    ),
    "more keys than values": (lambda b, x, y: b.attention(y, y, x, 8), "3 query, 3 key and 2 value heads"),
    "a cache that is none": (lambda b, x, y: b.attention_to(y, x), "expected what attention\\(\\) made"),
    "a slice of what is not there": (lambda b, x, y: b.slice(x, 8, 17), "slice 8 to 17 of 16 features"),
    "a window and chunks": (
        lambda b, x, y: b.attention(x, x, x, 8, window=4, chunk=8),
        "a window of 4 and chunks of 8 tokens, expected one of them",
    ),
    "a window of nothing": (
        lambda b, x, y: b.attention(x, x, x, 8, window=0),
        "window of 0 tokens, expected at least 1",
    ),
    "scores capped at nothing": (lambda b, x, y: b.attention(x, x, x, 8, soft_cap=0.0), "attention with a cap of 0.0"),
    "a cap below zero": (
        lambda b, x, y: b.soft_cap(x, -30.0),
        "soft_cap with a cap of -30.0, expected a positive number",
    ),
    "gates of another size": (lambda b, x, y: b.gated(x, y, "silu"), "Gated of 16 and 24 features"),
    "a sum of two sizes": (lambda b, x, y: b.add(x, y), "Add of 16 and 24 features"),
    "a projection to nothing": (
        lambda b, x, y: b.linear(x, LinearPart("p", 8), LinearPart("q", 0)),
        "a value of 0 features",
    ),
    "no projection": (lambda b, x, y: b.linear(x), "linear of no parts"),
    "a vocabulary of nothing": (lambda b, x, y: b.embed("e", 64, 0), "a value of 0 features"),
    "a slice too few": (
        lambda b, x, y: b.split(x, LinearPart("p", 8, slices=(4, 2))),
        "p: slices \\[4, 2\\] of 8 outputs",
    ),
    "a slice of nothing": (lambda b, x, y: b.split(x, LinearPart("p", 8, slices=(8, 0))), "a value of 0 features"),
    "a gate of some features": (lambda b, x, y: b.gate(y, x), "gate of 16 features for 24"),
    "more experts than there are": (lambda b, x, y: experts(b, x, b.input(4), 5), "5 of 4 experts, chosen by 4 logits"),
    "groups of unequal experts": (
        lambda b, x, y: experts(b, x, b.input(4), groups=3),
        "2 experts of 1 of 3 groups of 4",
    ),
    "more experts than chosen groups have": (
        lambda b, x, y: experts(b, x, b.input(4), groups=4),
        "2 experts of 1 of 4 groups of 4",
    ),
    "keys of another builder": (lambda b, x, y: b.latent_attention(x, foreign(8), 8, scale=1.0), "another builder"),
    "logits of other experts": (lambda b, x, y: experts(b, x, x), "2 of 4 experts, chosen by 16 logits"),
    "experts of two sizes": (lambda b, x, y: experts(b, x, b.input(4), up=8), "experts with 24 gates and 8 ups"),
    "a convolution of one token": (
        lambda b, x, y: b.short_conv([x, y], "c", 1, "silu"),
        "c: a convolution over 1 tokens, expected 2 to 8",
    ),
    "a delta rule of other heads": (
        lambda b, x, y: b.delta_rule(x, x, y, b.input(3), b.input(2), DELTA_RULE),
        "delta rule of \\[16, 16, 24, 3, 2\\] features, expected \\[16, 16, 24, 2, 2\\]",
    ),
    "a delta rule whose keys no heads share": (
        lambda b, x, y: b.delta_rule(x, x, y, x, x, replace(DELTA_RULE, num_heads=3)),
        "delta rule of 3 heads and 2 key heads",
    ),
    "a function of nowhere": (
        lambda b, x, y: b.torch_function("squared", x, size=16),
        "torch function 'squared': expected package.module:function",
    ),
    "a function of nothing": (lambda b, x, y: b.torch_function("m:f", size=16), "16 features of inputs of \\[\\]"),
    "feature by feature, and more of them": (
        lambda b, x, y: b.torch_function("m:f", x, y, size=16, by_feature=True),
        "torch function m:f: 16 features of inputs of \\[16, 24\\], expected as many",
    ),
    "a value of another builder": (lambda b, x, y: b.add(x, foreign(16)), "was made by another builder"),
    "a value of another size": (
        lambda b, x, y: b.activation(Value(x.number, 24), "relu"),
        "was made by another builder",
    ),
    "queries of another builder": (lambda b, x, y: b.attention(foreign(16), x, x, 8), "was made by another builder"),
    "values of another builder": (lambda b, x, y: b.attention(x, x, foreign(16), 8), "was made by another builder"),
    "a residual of another builder": (lambda b, x, y: b.layer(foreign(16)).__enter__(), "was made by another builder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_leaves_nothing_after(name: str) -> None:
    record, message = REFUSED[name]
    b = Builder()
    x, y = b.input(16), b.input(24)
    with pytest.raises(ValueError, match=message):
        record(b, x, y)
    assert not list(b.graph().nodes) and not b.graph().caches


def test_layers_lie_one_after_another() -> None:
    b = Builder()
    x = b.embed("embed", 64, 16)
    with b.layer(x), pytest.raises(ValueError, match="a layer inside of a layer"), b.layer(x):
        pass
    b.rms_norm(x, "last", 1e-5)
    with pytest.raises(ValueError, match="after ops that follow the last layer"), b.layer(x):
        pass
