"""Who holds what: the shares of all ranks are the whole model once, but for what is named; what each rank computes fits
together; what cannot be shared out is refused, with the sizes that could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.graph import Builder, Graph, KVSpec, Value
from engine.contracts.ops import (
    AllGather,
    AllReduce,
    Attention,
    Cut,
    Embed,
    Experts,
    FusedExperts,
    Gated,
    HeadLinear,
    HeldExperts,
    KVWrite,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    OwnExperts,
    RopeFacts,
    Route,
    Slice,
)
from engine.kv.groups import cache_groups, of_rank
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.shares import Units
from engine.models.stages import Stage, crossing, layer_costs, stages_of

HIDDEN = 64
Change = Callable[[Builder, Value], Value]


def unit(spec: LinearSpec, axis: str) -> int | None:
    """Of weights as they are: any feature."""
    return 1


def model(
    heads: int = 8, kv_heads: int = 4, dim: int = 4, inner: int = 48, vocab: int = 60, *, layers: int = 1,
    tied: bool = False, bias: bool = False, queries: Change = lambda b, q: q, products: Change = lambda b, x: x,
) -> Graph:  # fmt: skip
    """A Llama. ``queries``, ``products``: what is done to queries, and to what gates made."""
    b = Builder()
    x = b.embed("embed", vocab, HIDDEN)
    for i in range(layers):
        with b.layer(x):
            sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
            parts = [LinearPart(f"{i}.{name}", size, bias) for name, size in sizes.items()]
            q, k, v = b.linear(b.rms_norm(x, f"{i}.norm", 1e-5), *parts, shard="out")
            a = b.attention(*b.rope(queries(b, q), k, RopeFacts(), dim), v, dim)
            x = b.add(x, b.linear(a, LinearPart(f"{i}.o", HIDDEN, bias), shard="in"))
            gate, up = b.linear(x, LinearPart(f"{i}.gate", inner), LinearPart(f"{i}.up", inner), shard="out")
            made = products(b, b.gated(gate, up, "silu"))
            x = b.add(x, b.linear(made, LinearPart(f"{i}.down", HIDDEN, bias), shard="in"))
    b.lm_head(b.rms_norm(x, "last", 1e-5), "head", vocab, tied=tied)
    return b.graph()


def mixture(experts: int = 5, inner: int = 12, fused: bool = False) -> Graph:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        gate_up, down = (LinearPart("{}.gate", inner), LinearPart("{}.up", inner)), LinearPart("{}.down", HIDDEN, True)
        together = FusedExperts("gate_up", "down") if fused else None
        logits = b.router(x, "router", experts, bias=True)
        x = b.add(x, b.experts(x, logits, Route(experts, 2), gate_up, down, Gated("silu"), fused=together))
    b.lm_head(x, "head", 60)
    return b.graph()


def latent(heads: int = 4) -> Graph:
    """Queries of 6 + 2 dimensions by way of 12, keys of 16 + 2 that all heads share, values of 5."""
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        q = b.linear(b.rms_norm(b.linear(x, LinearPart("q_a", 12)), "q_norm", 1e-6), LinearPart("q_b", heads * 8),
                     shard="out")  # fmt: skip
        k = b.linear(x, LinearPart("kv_a", 18))
        own = HeadLinear("kv_b", heads, 11, 16, 0, 6, transposed=True)
        absorbed = b.head_join(b.head_linear(b.head_slice(q, 8, 0, 6), own), b.head_slice(q, 8, 6, 8), heads)
        a = b.latent_attention(absorbed, k, 16, scale=0.3)
        a = b.head_linear(a, replace(own, start=6, stop=11, transposed=False))
        x = b.add(x, b.linear(a, LinearPart("o", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    return b.graph()


# -- what ranks hold


def held(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Of each tensor that a rank reads, 1 where it holds a number, ``[out, in]`` or ``[size]``."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for node in graph.nodes:
        op = node.op
        if isinstance(op, Embed):
            rows = op.rows or Cut(0, op.vocab_size, op.vocab_size)
            found[f"{op.name}.weight"] = marked((op.vocab_size, op.size), [rows[:2]])
        elif isinstance(op, HeadLinear):
            found |= of_linear(op.projection)
        elif isinstance(op, Linear):
            found |= {} if op.tied else of_linear(op.spec)
        elif isinstance(op, Experts):
            for spec in op.linears:
                found |= of_linear(spec)
        else:
            heads = op.heads if isinstance(op, Norm) else node.heads
            for name, shape in node.op.reads(node):
                found[name] = marked(shape, [(0, shape[0])] if heads is None else [heads[:2]])
    return found


def of_linear(spec: LinearSpec) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for number, part in enumerate(spec.whole.parts):
        whole = (0, part.out_features)
        rows = (whole,) if spec.share is None else spec.share.rows[number]
        columns = None if spec.share is None else spec.share.columns
        shape = part.out_features, spec.whole.in_features
        found[f"{part.name}.weight"] = marked(shape, rows, columns or (0, shape[1]))
        if part.bias:
            found[f"{part.name}.bias"] = marked(shape[:1], rows if columns is None or columns[0] == 0 else [])
    return found


def marked(shape: tuple[int, ...], rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None) -> Any:
    cells = np.zeros(shape, dtype=int)
    for start, stop in rows:
        cells[start:stop] += 1 if columns is None else np.isin(np.arange(shape[1]), np.arange(*columns))
    return cells


def together(graph: Graph, ranks: Sequence[RankGraph]) -> dict[str, np.ndarray[Any, Any]]:
    """How many ranks hold each number of each tensor. All of the model's tensors are there."""
    counts = {name: np.zeros_like(cells) for name, cells in held(graph).items()}
    for rank in ranks:
        for name, cells in held(rank.graph).items():
            counts[name] += cells
    return counts


def repeated(graph: Graph, layout: Layout, units: Units = unit) -> set[str]:
    """Tensors of which several ranks hold the same numbers; all others are the whole once."""
    found = set()
    for name, counts in together(graph, place(graph, layout, units)).items():
        assert counts.min() >= 1, f"nobody has all of {name}"
        if counts.max() > 1:
            found.add(name)
    return found


NORMS = {"0.norm.weight", "last.weight"}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_shares_of_all_ranks_are_the_whole_model_and_only_norms_are_repeated(tp: int) -> None:
    assert repeated(model(bias=True), Layout(tp)) == NORMS


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_have_equal_parts_of_every_layer_where_sizes_allow(tied: bool) -> None:
    ranks = place(model(tied=tied), Layout(4), unit)
    sizes = [sum(int(cells.sum()) for cells in held(rank.graph).values()) for rank in ranks]
    norms = 2 * HIDDEN
    whole = sum(int(cells.sum()) for cells in held(model(tied=tied)).values())
    assert sizes == [(whole - norms) // 4 + norms] * 4


def test_a_stage_has_its_layers_and_nothing_else() -> None:
    graph = model(layers=4)
    first, second = (held(rank.graph).keys() for rank in place(graph, Layout(1, 2), unit, stage_layers=[2, 2]))
    assert not first & second and first | second == held(graph).keys()
    assert {name[0] for name in first} == {"e", "0", "1"} and {name[0] for name in second} == {"2", "3", "l", "h"}


def test_biases_of_summands_are_added_once() -> None:
    ranks = place(model(bias=True), Layout(3), unit)
    for name in ("0.o.bias", "0.down.bias"):
        assert [bool(held(rank.graph)[name].any()) for rank in ranks] == [True, False, False]


# -- heads


def attention(rank: RankGraph) -> tuple[Attention, KVWrite]:
    ops = [node.op for node in rank.graph.nodes]
    write = next(op for op in ops if isinstance(op, KVWrite))
    return next(op for op in ops if isinstance(op, Attention)), write


HEADS: dict[str, tuple[int, int, int, list[tuple[int, int]]]] = {
    "equal": (8, 4, 2, [(4, 2), (4, 2)]),
    "one key head more on the first": (6, 3, 2, [(4, 2), (2, 1)]),
    "all key heads apart": (6, 3, 3, [(2, 1)] * 3),
    "key heads on two ranks each": (8, 2, 4, [(2, 1)] * 4),
    "one key head on two ranks": (8, 2, 3, [(2, 1), (2, 1), (4, 1)]),
    "queries of a key head unevenly": (6, 2, 4, [(2, 1), (1, 1), (2, 1), (1, 1)]),
    "one key head for all": (6, 1, 4, [(2, 1), (2, 1), (1, 1), (1, 1)]),
    "as many as queries": (5, 5, 2, [(3, 3), (2, 2)]),
}
"""Query and key heads, ranks, and the same of each rank."""


@pytest.mark.parametrize("name", HEADS)
def test_queries_are_where_the_keys_are_that_they_read(name: str) -> None:
    heads, kv_heads, tp, expected = HEADS[name]
    graph = model(heads, kv_heads)
    ranks = place(graph, Layout(tp), unit)
    found = [attention(rank) for rank in ranks]
    assert [(op.num_heads, op.num_kv_heads) for op, _ in found] == expected
    assert [write.num_kv_heads for _, write in found] == [kv for _, kv in expected]
    assert [rank.graph.caches for rank in ranks] == [(KVSpec(kv, 4),) for _, kv in expected]
    for rank in ranks:
        check_heads(rank, heads // kv_heads)
    keys = {f"0.{part}.weight" for part in "kv"}
    assert repeated(graph, Layout(tp)) == NORMS | (keys if tp > kv_heads else set())


def check_heads(rank: RankGraph, group: int) -> None:
    """A rank's ``i``-th query head reads its key head ``i // (heads / kv_heads)``, which is the one it reads on one
    rank."""
    op, write = attention(rank)
    node = next(node for node in rank.graph.nodes if isinstance(node.op, Attention))
    queries, keys = node.heads, write.heads
    if queries is None or keys is None:
        assert queries is keys is None and rank.stage is not None
        return
    assert op.num_heads % op.num_kv_heads == 0
    for i in range(op.num_heads):
        mine = keys.start + i // (op.num_heads // op.num_kv_heads)
        assert mine == (queries.start + i) // group and keys.start <= mine < keys.stop


def test_projections_cut_between_heads_and_what_gates_made_is_summed_up() -> None:
    graph = place(model(6, 3), Layout(2), unit)[1].graph
    specs = {node.op.spec.parts[0].name: node.op.spec for node in graph.nodes if isinstance(node.op, Linear)}
    assert [part.out_features for part in specs["0.q"].parts] == [8, 4, 4]
    assert specs["0.q"].share is not None and specs["0.q"].share.rows == (((16, 24),), ((8, 12),), ((8, 12),))
    assert specs["0.o"].share is not None and specs["0.o"].share.columns == (16, 24)
    assert specs["0.o"].in_features == 8 and specs["0.o"].out_features == HIDDEN
    kinds = [type(node.op) for node in graph.layers[0].nodes]
    assert kinds.count(AllReduce) == 2 and kinds.count(AllGather) == 0


def test_sizes_of_values_are_those_of_the_rank() -> None:
    for rank in place(model(6, 3, inner=50), Layout(3), unit):
        graph = rank.graph
        for node in graph.nodes:
            if isinstance(node.op, Linear):
                assert [graph.sizes[value] for value in node.outputs] == list(node.op.spec.outputs)
                assert graph.sizes[node.inputs[0]] == node.op.spec.in_features


def test_projections_that_a_checkpoint_has_fused_are_ranges_of_it() -> None:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        q, k, v = b.split(x, LinearPart("qkv", 40, True, (24, 8, 8)), shard="out")
        x = b.add(x, b.linear(b.attention(q, k, v, 4), LinearPart("o", HIDDEN), shard="in"))
        gate, up = b.split(x, LinearPart("gate_up", 30, slices=(15, 15)), shard="out")
        x = b.add(x, b.linear(b.gated(gate, up, "silu"), LinearPart("down", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    graph = b.graph()
    assert repeated(graph, Layout(2)) == set()
    specs = [node.op.spec for node in place(graph, Layout(2), unit)[1].graph.nodes if isinstance(node.op, Linear)]
    qkv, gate_up = specs[0], specs[2]
    assert qkv.share is not None and qkv.share.rows == (((12, 24), (28, 32), (36, 40)),)
    assert qkv.parts == (LinearPart("qkv", 20, True, (12, 4, 4)),)
    assert gate_up.share is not None and gate_up.share.rows == (((8, 15), (23, 30)),)


def test_latent_attention_has_its_queries_shared_out_and_its_one_key_head_on_every_rank() -> None:
    graph = latent()
    assert repeated(graph, Layout(4)) == {"q_a.weight", "q_norm.weight", "kv_a.weight"}
    for index, rank in enumerate(place(graph, Layout(4), unit)):
        op, write = attention(rank)
        assert (op.num_heads, op.num_kv_heads, write.num_kv_heads) == (1, 1, 1)
        assert rank.graph.caches == graph.caches
        of_heads = [node.op for node in rank.graph.nodes if isinstance(node.op, HeadLinear)]
        assert [op.heads for op in of_heads] == [Cut(index, index + 1, 4)] * 2
        assert {name: cells.sum() for name, cells in held(rank.graph).items()}["kv_b.weight"] == 11 * 16


def test_sinks_are_those_of_the_rank_s_heads() -> None:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        q, k, v = b.linear(x, LinearPart("q", 12), LinearPart("k", 6), LinearPart("v", 6), shard="out")
        x = b.add(x, b.linear(b.attention(q, k, v, 2, sinks="sinks"), LinearPart("o", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    nodes = [node for rank in place(b.graph(), Layout(2), unit) for node in rank.graph.nodes]
    assert [node.heads for node in nodes if isinstance(node.op, Attention)] == [Cut(0, 4, 6), Cut(4, 6, 6)]
    assert repeated(b.graph(), Layout(2)) == set()


def test_a_later_layer_reads_keys_of_the_rank_s_own() -> None:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        q, k, v = b.linear(x, LinearPart("q", 24), LinearPart("k", 8), LinearPart("v", 8), shard="out")
        first = b.attention(q, k, v, 4)
        x = b.add(x, b.linear(first, LinearPart("o", HIDDEN), shard="in"))
    with b.layer(x):
        second = b.attention_to(first, b.linear(x, LinearPart("wide", 48), shard="out"))
        x = b.add(x, b.linear(second, LinearPart("o2", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    ranks = place(b.graph(), Layout(2), unit)
    both = [[node.op for node in rank.graph.nodes if isinstance(node.op, Attention)] for rank in ranks]
    assert [[(op.num_heads, op.num_kv_heads) for op in ops] for ops in both] == [[(3, 1), (6, 1)]] * 2
    assert repeated(b.graph(), Layout(2)) == set()


# -- what needs all of a value


def test_a_norm_over_all_heads_sees_all_of_them() -> None:
    """They are gathered and normed on every rank, and each rank goes on with its own where keys are cut."""
    graph = model(queries=lambda b, q: b.rms_norm(q, "whole", 1e-5))
    for index, rank in enumerate(place(graph, Layout(2), unit)):
        ops = [node.op for node in rank.graph.layers[0].nodes]
        at = ops.index(Norm("rms", "whole", 32, 1e-5))
        assert ops[at - 1] == AllGather(32, ((0, 16), (16, 32)))
        assert [op for op in ops if isinstance(op, Slice)] == [Slice(16 * index, 16 * index + 16)]
        assert attention(rank)[0].num_heads == 4
    assert repeated(graph, Layout(2)) == {*NORMS, "whole.weight"}


def test_a_norm_over_key_heads_that_several_ranks_have_sees_each_once() -> None:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        q, k, v = b.linear(x, LinearPart("q", 24), LinearPart("k", 8), LinearPart("v", 8), shard="out")
        x = b.add(x, b.linear(b.attention(q, b.rms_norm(k, "keys", 1e-5), v, 4), LinearPart("o", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    rank = place(b.graph(), Layout(4), unit)[3]
    gathers = [node.op for node in rank.graph.layers[0].nodes if isinstance(node.op, AllGather)]
    assert gathers == [AllGather(8, ((0, 2), (2, 4), (4, 6), (6, 8)))], "features, whatever heads they belong to"
    assert [node.op for node in rank.graph.layers[0].nodes if isinstance(node.op, Slice)] == [Slice(4, 8)]
    assert repeated(b.graph(), Layout(4)) == {"keys.weight", "v.weight"}


def test_heads_are_normed_where_they_are() -> None:
    def normed(b: Builder, q: Value) -> Value:
        return b.layer_norm(b.rms_norm(q, "alike", 1e-5, size=4), "each", 1e-5, size=4, by_head=True)

    graph = model(queries=normed)
    for index, rank in enumerate(place(graph, Layout(2), unit)):
        (each,) = (node.op for node in rank.graph.nodes if isinstance(node.op, Norm) and node.op.name == "each")
        assert each.by_head == 4 and each.heads == Cut(4 * index, 4 * index + 4, 8)
        assert not any(isinstance(node.op, AllGather) for node in rank.graph.layers[0].nodes)
    assert repeated(graph, Layout(2)) == {*NORMS, "alike.weight"}


@pytest.mark.parametrize("by_feature", [True, False])
def test_a_function_of_all_features_sees_all_of_them(by_feature: bool) -> None:
    graph = model(products=lambda b, x: b.torch_function("m:f", x, size=48, by_feature=by_feature))
    kinds = [type(node.op) for node in place(graph, Layout(2), unit)[0].graph.layers[0].nodes]
    assert (AllGather in kinds) == (not by_feature)


def test_what_is_gathered_once_is_gathered_for_all_that_read_it() -> None:
    def twice(b: Builder, q: Value) -> Value:
        return b.add(b.rms_norm(q, "one", 1e-5), b.rms_norm(q, "other", 1e-5))

    nodes = place(model(queries=twice), Layout(2), unit)[0].graph.layers[0].nodes
    assert [type(node.op) for node in nodes].count(AllGather) == 1


def test_a_layer_whose_inputs_cannot_be_cut_makes_some_outputs_of_all_inputs() -> None:
    """As in activation order: nothing is summed up, and what was shared out is gathered."""

    def ordered(spec: LinearSpec, axis: str) -> int | None:
        return None if axis == "in" else 8

    graph = model()
    ranks = place(graph, Layout(2), ordered)
    for index, rank in enumerate(ranks):
        nodes = rank.graph.layers[0].nodes
        assert not any(isinstance(node.op, AllReduce) for node in nodes)
        specs = {node.op.spec.parts[0].name: node.op.spec for node in nodes if isinstance(node.op, Linear)}
        for name in ("0.o", "0.down"):
            share = specs[name].share
            assert share is not None and share.columns is None and share.rows == (((32 * index, 32 * index + 32),),)
        gathered = [node.op.size for node in nodes if isinstance(node.op, AllGather)]
        assert gathered == [32, HIDDEN, 48, HIDDEN]
    assert repeated(graph, Layout(2), ordered) == NORMS


def test_a_layer_that_cannot_be_cut_at_all_is_on_every_rank() -> None:
    def whole(spec: LinearSpec, axis: str) -> int | None:
        return None if spec.parts[0].name in ("0.gate", "0.down") else 1

    graph = model()
    assert repeated(graph, Layout(2), whole) == {*NORMS, "0.gate.weight", "0.up.weight", "0.down.weight"}
    kinds = [type(node.op) for node in place(graph, Layout(2), whole)[0].graph.layers[0].nodes]
    assert kinds.count(AllReduce) == 1 and AllGather not in kinds, "only attention's sum"


# -- vocabulary


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [60, 61, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_is_cut_and_logits_are_gathered_at_the_end(tied: bool, vocab: int, tp: int) -> None:
    """A tied head has the rows of the embedding that are on its rank."""
    ranks = place(model(vocab=vocab, tied=tied), Layout(tp), unit)
    sizes = [vocab // tp + (i < vocab % tp) for i in range(tp)]
    for index, rank in enumerate(ranks):
        rows, head = rank.graph.embedding.rows, rank.graph.lm_head.spec
        assert rows == Cut(sum(sizes[:index]), sum(sizes[: index + 1]), vocab)
        assert head.out_features == sizes[index] and head.share is not None
        assert head.share.rows == (((rows.start, rows.stop),),)
        assert isinstance(rank.graph.embed.nodes[-1].op, AllReduce), "other ranks' rows are 0"
        last = rank.graph.head.nodes[-1]
        assert isinstance(last.op, AllGather) and last.op.size == vocab
        assert rank.graph.sizes[last.outputs[0]] == vocab


def test_caps_and_scales_of_logits_are_computed_where_they_are() -> None:
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    with b.layer(x):
        x = b.add(x, b.linear(x, LinearPart("one", HIDDEN)))
    b.soft_cap(b.scale(b.lm_head(x, "head", 60), 0.5), 30.0)
    kinds = [type(node.op).__name__ for node in place(b.graph(), Layout(2), unit)[0].graph.head.nodes]
    assert kinds == ["Linear", "Scale", "SoftCap", "AllGather"]


# -- experts


def experts(rank: RankGraph) -> Experts:
    (op,) = (node.op for node in rank.graph.nodes if isinstance(node.op, Experts))
    return op


def test_experts_are_cut_inside() -> None:
    graph = mixture(inner=15)
    assert repeated(graph, Layout(2)) == {"router.weight", "router.bias"}
    ranks = place(graph, Layout(2), unit)
    assert [experts(rank).down.in_features for rank in ranks] == [8, 7]
    assert [experts(rank).gate_up.out_features for rank in ranks] == [16, 14]
    assert all(experts(rank).num_experts == 5 and experts(rank).held is None for rank in ranks)
    biased = [held(rank.graph)["3.down.bias"].any() for rank in ranks]
    assert biased == [True, False]


def test_experts_are_spread_whole() -> None:
    """Five over two ranks; every rank chooses, and sets aside what others have."""
    graph = mixture()
    assert repeated(graph, Layout(2, 1, 2)) == {"router.weight", "router.bias"}
    ranks = place(graph, Layout(2, 1, 2), unit)
    assert [experts(rank).held for rank in ranks] == [HeldExperts((0, 1, 2), 5), HeldExperts((3, 4), 5)]
    assert [experts(rank).num_experts for rank in ranks] == [3, 2]
    assert all(experts(rank).down.share is None for rank in ranks)
    kinds = [type(node.op) for node in ranks[1].graph.layers[0].nodes]
    assert kinds[2:5] == [OwnExperts, Experts, AllReduce]


def test_experts_are_spread_and_cut_inside() -> None:
    graph = mixture(experts=6, inner=12)
    assert repeated(graph, Layout(4, 1, 2)) == {"router.weight", "router.bias"}
    found = [(experts(rank).held, experts(rank).down.share) for rank in place(graph, Layout(4, 1, 2), unit)]
    assert [held.ranges for held, _ in found if held is not None] == [((0, 3),)] * 2 + [((3, 6),)] * 2
    assert [share.columns for _, share in found if share is not None] == [(0, 6), (6, 12)] * 2


def test_gates_and_ups_that_are_stored_together_are_cut_as_what_they_make() -> None:
    assert experts(place(mixture(fused=True), Layout(3), unit)[2]).down.in_features == 4

    def together_only(spec: LinearSpec, axis: str) -> int | None:
        return 6 if spec.parts[0].name in ("gate_up", "down") else 1

    ranks = place(mixture(fused=True), Layout(2), together_only)
    assert [experts(rank).down.in_features for rank in ranks] == [6, 6]
    with pytest.raises(ValueError, match=r"down has 2 parts that cannot be cut further; parallelism.tp=1, 2 would fit"):
        place(mixture(fused=True), Layout(3), together_only)


EXPERTS_REFUSED: dict[str, tuple[Graph, Layout, Units, str]] = {
    "none": (model(), Layout(2, 1, 2), unit, r"parallelism.ep=2: the model has no experts"),
    "too few": (mixture(3), Layout(4, 1, 4), unit, r"parallelism.ep=4: the model has 3 experts"),
    "stored so that they cannot be cut": (
        mixture(), Layout(2), lambda spec, axis: None if "{}" in spec.parts[0].name else 1,
        r"\{\}.down: experts that are stored so cannot be cut; parallelism.ep spreads them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS_REFUSED)
def test_experts_that_cannot_be_shared_out_are_refused(name: str) -> None:
    graph, layout, units, said = EXPERTS_REFUSED[name]
    with pytest.raises(ValueError, match=said):
        place(graph, layout, units)


def test_experts_that_cannot_be_cut_may_be_spread() -> None:
    ranks = place(mixture(), Layout(2, 1, 2), lambda spec, axis: None if "{}" in spec.parts[0].name else 1)
    assert [experts(rank).num_experts for rank in ranks] == [3, 2]


# -- units


def of(**units: int) -> Units:
    """``down_in=16``: of the layer whose name ends so, along that axis; else 1."""

    def found(spec: LinearSpec, axis: str) -> int | None:
        return units.get(f"{spec.parts[0].name.rpartition('.')[2]}_{axis}", 1)

    return found


UNITS: dict[str, tuple[int, int, dict[str, int], list[int]]] = {
    "231 groups over two ranks": (231 * 128, 2, {"down_in": 128}, [116 * 128, 115 * 128]),
    "231 groups over eight": (231 * 128, 8, {"down_in": 128}, [29 * 128] * 7 + [28 * 128]),
    "four and a half blocks": (576, 2, {"down_in": 128, "gate_out": 128}, [384, 192]),
    "four and a half blocks over four": (576, 4, {"down_in": 128, "gate_out": 128}, [256, 128, 128, 64]),
    "words and groups": (96, 2, {"down_in": 12, "gate_out": 8}, [48, 48]),
    "words across groups": (72, 3, {"down_in": 12, "gate_out": 8}, [24, 24, 24]),
    "six blocks over four": (768, 4, {"down_in": 128}, [256, 256, 128, 128]),
}
"""Features between two layers, ranks, units, and how many features each rank has."""


@pytest.mark.parametrize("name", UNITS)
def test_no_cut_goes_through_a_unit_of_either_layer(name: str) -> None:
    inner, tp, units, expected = UNITS[name]
    ranks = place(model(32, 32, inner=inner), Layout(tp), of(**units))
    downs = [
        node.op.spec for rank in ranks for node in rank.graph.nodes
        if isinstance(node.op, Linear) and node.op.spec.parts[0].name == "0.down"
    ]  # fmt: skip
    assert [spec.in_features for spec in downs] == expected


REFUSED: dict[str, tuple[Graph, int, dict[str, int], str]] = {
    "fewer heads than ranks": (
        model(6, 3), 7, {}, "parallelism.tp=7: 0.q, of one key head, has 2 parts that cannot be cut further; "
        "parallelism.tp=1, 2, 3, 4, 5, 6 would fit",
    ),
    "fewer groups than ranks": (
        model(inner=48), 4, {"down_in": 16}, "parallelism.tp=4: 0.gate has 3 parts that cannot be cut further; "
        "parallelism.tp=1, 2, 3 would fit",
    ),
    "groups of several key heads": (
        model(8, 4), 4, {"o_in": 16}, "parallelism.tp=4: 0.q: queries of different key heads share a scale; "
        "parallelism.tp=1, 2 would fit",
    ),
    "a small vocabulary": (
        model(vocab=3), 4, {}, "parallelism.tp=4: (embed|head) has 3 parts that cannot be cut further; parallelism.tp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_refused_with_the_sizes_that_can(name: str) -> None:
    graph, tp, units, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        place(graph, Layout(tp), of(**units))


@given(
    kv_heads=st.integers(1, 5), group=st.integers(1, 4), dim=st.sampled_from((2, 4, 6)), inner=st.integers(1, 40),
    vocab=st.integers(1, 20), tp=st.integers(2, 7), o_in=st.sampled_from((1, 2, 4, 8)),
    down_in=st.sampled_from((1, 3, 8)), gate_out=st.sampled_from((1, 2, 8)), tied=st.booleans(),
)  # fmt: skip
def test_any_model_is_shared_out_whole_or_refused_with_sizes_that_fit(
    kv_heads: int, group: int, dim: int, inner: int, vocab: int, tp: int, tied: bool, **units: int
) -> None:
    graph = model(kv_heads * group, kv_heads, dim, inner, vocab, tied=tied, bias=True)
    try:
        ranks = place(graph, Layout(tp), of(**units))
    except ValueError as error:
        said = str(error)
        fit = [int(number) for number in said.rpartition("parallelism.tp=")[2].removesuffix(" would fit").split(", ")]
        assert said.startswith(f"parallelism.tp={tp}: ") and 1 in fit and tp not in fit
        for other in fit[1:]:
            check_whole(graph, place(graph, Layout(other), of(**units)), group, units)
        return
    check_whole(graph, ranks, group, units)


def check_whole(graph: Graph, ranks: Sequence[RankGraph], group: int, units: Mapping[str, int]) -> None:
    for name, counts in together(graph, ranks).items():
        assert counts.min() >= 1, f"nobody has all of {name}"
        if not name.startswith(("0.k.", "0.v.", "0.norm", "last")):
            assert counts.max() == 1, f"{name} is repeated"
    for rank in ranks:
        check_heads(rank, group)
        for node in rank.graph.nodes:
            if not isinstance(node.op, Linear) or node.op.spec.share is None:
                continue
            share, name = node.op.spec.share, node.op.spec.parts[0].name.rpartition(".")[2]
            cuts = [edge for ranges in share.rows for edges in ranges for edge in edges]
            if share.columns is None:
                sizes = {part.out_features for part in share.whole.parts}
                assert all(edge % units.get(f"{name}_out", 1) == 0 or edge in sizes for edge in cuts)
            else:
                assert share.columns[0] % units.get(f"{name}_in", 1) == 0


# -- stages


def test_stages_cost_alike_and_a_large_head_counts_as_several_layers() -> None:
    graph = model(layers=8)
    assert stages_of(graph, 2, [1.0] * 8 + [0.0]) == (Stage(0, 4), Stage(4, 8))
    assert stages_of(graph, 2, [1.0] * 8 + [4.0]) == (Stage(0, 6), Stage(6, 8))
    assert stages_of(graph, 3, [1.0] * 8 + [9.0]) == (Stage(0, 3), Stage(3, 7), Stage(7, 8))
    assert stages_of(graph, 4, [3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 0.0])[0] == Stage(0, 1)


def test_stages_may_be_given() -> None:
    graph = model(layers=8)
    assert [rank.stage for rank in place(graph, Layout(1, 2), unit, stage_layers=[6, 2])] == [Stage(0, 6), Stage(6, 8)]
    with pytest.raises(ValueError, match=r"stage_layers=\[6, 3\]: these are for 9 in all, and the model has 8 layers"):
        place(graph, Layout(1, 2), unit, stage_layers=[6, 3])


def test_a_given_stage_reads_no_cache_of_another() -> None:
    with pytest.raises(ValueError, match=r"stage_layers=.*: layer \d reads what a layer of the stage before caches"):
        place(shared_caches(), Layout(1, 2), unit, stage_layers=[2, 2])


def test_costs_are_weights_that_a_token_reads() -> None:
    graph = model(layers=2, vocab=1000)
    layer = HIDDEN * (32 + 16 + 16 + 32) + 3 * HIDDEN * 48
    assert layer_costs(graph) == [layer, layer, 1000 * HIDDEN]
    assert layer_costs(mixture())[0] == 2 * 3 * 12 * HIDDEN, "two of five experts"


@given(costs=st.lists(st.integers(1, 9).map(float), min_size=2, max_size=9), count=st.integers(1, 4))
def test_no_other_cut_has_a_cheaper_largest_stage_or_more_equal_ones(costs: list[float], count: int) -> None:
    graph = model(layers=len(costs) - 1)
    layers = [*costs[:-2], costs[-2] + costs[-1]]
    if count > len(layers):
        with pytest.raises(ValueError, match=rf"parallelism.pp={count}: the model falls into at most {len(layers)} st"):
            stages_of(graph, count, costs)
        return
    found = stages_of(graph, count, costs)
    assert [stage.first for stage in found] == [0, *(stage.last for stage in found[:-1])]
    assert found[-1].last == len(layers) and all(stage.last > stage.first for stage in found)
    cheapest = min(cuts(layers, count), key=lambda stages: (max(stages), sum(cost**2 for cost in stages)))
    mine = [sum(layers[stage.first : stage.last]) for stage in found]
    assert max(mine) == max(cheapest)
    assert sum(cost**2 for cost in mine) == sum(cost**2 for cost in cheapest)


def cuts(layers: Sequence[float], count: int) -> Iterator[list[float]]:
    """Costs of stages, of every cut."""
    for ends in combinations(range(1, len(layers)), count - 1):
        yield [sum(layers[start:stop]) for start, stop in pairwise([0, *ends, len(layers)])]


def shared_caches() -> Graph:
    """Layers 2 and 3 read the cache of layer 1."""
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    first = x
    for i in range(4):
        with b.layer(x):
            if i < 2:
                q, k, v = b.linear(x, *(LinearPart(f"{i}.{name}", 16) for name in "qkv"), shard="out")
                first = b.attention(q, k, v, 4, window=8 if i else None)
                a = first
            else:
                a = b.attention_to(first, b.linear(x, LinearPart(f"{i}.q", 16), shard="out"))
            x = b.add(x, b.linear(a, LinearPart(f"{i}.o", HIDDEN), shard="in"))
    b.lm_head(x, "head", 60)
    return b.graph()


def test_no_stage_begins_between_a_cache_and_who_reads_it() -> None:
    graph = shared_caches()
    assert stages_of(graph, 2, [1.0, 1.0, 1.0, 1.0, 0.0]) == (Stage(0, 1), Stage(1, 4))
    with pytest.raises(ValueError, match=r"parallelism.pp=3: the model falls into at most 2 stages"):
        place(graph, Layout(1, 3), unit)


def test_a_stage_has_its_caches_in_the_groups_of_the_model() -> None:
    """All tokens in group 0, a window in group 1: the second stage has only the latter, and still calls it 1."""
    graph = shared_caches()
    whole = cache_groups(graph.caches)
    ranks = place(graph, Layout(2, 2), unit)
    assert [rank.caches for rank in ranks] == [(0,), (0,), (1,), (1,)] and {rank.num_caches for rank in ranks} == {2}
    groups = [of_rank(whole, rank) for rank in ranks]
    assert [found.group_of for found in groups] == [(0,), (0,), (1,), (1,)]
    assert all(found.reaches == whole.reaches for found in groups)
    assert [found.caches[0].num_kv_heads for found in groups if isinstance(found.caches[0], KVSpec)] == [2] * 4
    assert [node.cache for node in ranks[3].graph.nodes if node.cache is not None] == [0, 0, 0, 0]


def test_what_later_layers_read_is_handed_on_by_every_stage() -> None:
    """The residual stream first, then what comes from before the layers."""
    b = Builder()
    x = b.embed("embed", 60, HIDDEN)
    own = b.embed("own", 60, 8)
    for i in range(3):
        with b.layer(x):
            x = b.add(x, b.linear(b.slice(own, 2 * i, 2 * i + 2), LinearPart(f"{i}", HIDDEN)))
    b.lm_head(x, "head", 60)
    graph = b.graph()
    first, second, third = place(graph, Layout(1, 3), unit, stage_layers=[1, 1, 1])
    assert first.graph.handed_on == second.graph.received == crossing(graph, 1)
    assert [graph.sizes[number] for number in second.graph.received] == [HIDDEN, 8]
    assert second.graph.handed_on == third.graph.received and not third.graph.handed_on
    assert third.is_last and not first.is_last and not second.is_last
    assert first.graph.hidden == crossing(graph, 1)[0]


def test_what_no_later_layer_reads_is_not_handed_on() -> None:
    graph = model(layers=2)
    assert crossing(graph, 1) == (graph.layers[1].residual,)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_last_stage_has_the_embedding_that_its_head_shares_or_a_drafter_reads(tp: int) -> None:
    """It is not computed there, but for drafts."""
    first, last = (place(model(layers=2, tied=True), Layout(tp, 2), unit)[rank] for rank in (0, 2 * tp - 1))
    assert first.graph.received == () and last.graph.received == crossing(model(layers=2), 1)
    assert last.graph.embedding.name == "embed"
    if tp > 1:
        rows, share = last.graph.embedding.rows, last.graph.lm_head.spec.share
        assert share is not None and rows is not None and share.rows == (((rows.start, rows.stop),),)
    graph = model(layers=2)
    assert not place(graph, Layout(tp, 2), unit)[-1].graph.embed.nodes
    drafting = place(graph, Layout(tp, 2), unit, drafts=True)[-1].graph
    assert drafting.embed.nodes and drafting.embed.residual == graph.layers[0].residual
    assert not drafting.handed_on and "head.weight" in held(drafting)


def test_one_rank_has_the_graph_as_it_is() -> None:
    graph = model(layers=2)
    (only,) = place(graph, Layout(), unit)
    assert only.graph == graph and only.caches == (0, 1) and only.is_last


# -- ranks


def test_ranks_are_numbered_stage_by_stage() -> None:
    layout = Layout(2, 3)
    assert layout.size == 6 and [layout.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.index(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [layout.before(rank) for rank in range(6)] == [None, None, 0, 1, 2, 3]
    assert [layout.after(rank) for rank in range(6)] == [2, 3, 4, 5, None, None]
    assert layout.chooser == 4
    assert layout.groups(3) == {"world": (0, 1, 2, 3, 4, 5), "stage": (2, 3), "tp": (2, 3)}


def test_ranks_that_share_out_tokens_follow_those_that_share_out_layers() -> None:
    layout = Layout(tp=2, pp=2, pcp=3)
    assert layout.size == 12 and layout.chooser == 6
    assert [layout.part(rank) for rank in range(6, 12)] == [0, 0, 1, 1, 2, 2]
    assert layout.before(9) == 3 and layout.after(3) == 9
    groups = layout.groups(9)
    assert groups["stage"] == (6, 7, 8, 9, 10, 11) and groups["tp"] == (8, 9) and groups["pcp"] == (7, 9, 11)


def test_experts_are_spread_over_equal_shares_of_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"parallelism.ep=2: does not divide parallelism.tp=3"):
        Layout(3, 1, 2)
