"""What ranks read, multiply and exchange in a step, against what was counted by hand."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from engine.contracts.graph import Builder, Graph
from engine.contracts.ops import Gated, LinearPart, Route
from engine.contracts.ops.touched import busiest_share, touched_experts
from engine.contracts.ops.work import Exchange, Step, Widths
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.work import RankWork, held_bytes, work_of

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 64, 8, 4, 8, 96, 256
QKV = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD
MLP = 3 * HIDDEN * INNER
LAYER = QKV + HEADS * HEAD * HIDDEN + MLP
"""Weights of the linear layers of a layer."""
EXPERTS, TOP, EXPERT_INNER = 12, 2, 32
EXPERT = 3 * HIDDEN * EXPERT_INNER


def dense(layers: int = 2, tied: bool = False, window: int | None = None) -> Graph:
    return _model(layers, tied, window, mixture=False)


def with_experts(layers: int = 2) -> Graph:
    return _model(layers, False, None, mixture=True)


def _model(layers: int, tied: bool, window: int | None, mixture: bool) -> Graph:
    b = Builder()
    b.positions(4096)
    x = b.embed("embed", VOCAB, HIDDEN)
    for i in range(layers):
        with b.layer(x):
            h = b.rms_norm(x, f"{i}.norm", 1e-5)
            parts = (LinearPart(f"{i}.q", HEADS * HEAD), LinearPart(f"{i}.k", KV_HEADS * HEAD),
                     LinearPart(f"{i}.v", KV_HEADS * HEAD))  # fmt: skip
            q, k, v = b.linear(h, *parts, shard="out")
            attended = b.attention(q, k, v, HEAD, scale=1.0, window=window)
            x = b.add(x, b.linear(attended, LinearPart(f"{i}.o", HIDDEN), shard="in"))
            if mixture:
                logits = b.router(x, f"{i}.router", EXPERTS)
                pair = LinearPart(f"{i}.{{}}.gate", EXPERT_INNER), LinearPart(f"{i}.{{}}.up", EXPERT_INNER)
                down = LinearPart(f"{i}.{{}}.down", HIDDEN)
                y = b.experts(x, logits, Route(EXPERTS, TOP), pair, down, Gated("silu"))
            else:
                gate, up = b.linear(x, LinearPart(f"{i}.gate", INNER), LinearPart(f"{i}.up", INNER), shard="out")
                y = b.linear(b.gated(gate, up, "silu"), LinearPart(f"{i}.down", HIDDEN), shard="in")
            x = b.add(x, y)
    b.lm_head(x, "head", VOCAB, tied=tied)
    return b.graph()


def placed(graph: Graph, **sizes: int) -> tuple[RankGraph, ...]:
    return place(graph, Layout(**sizes), lambda spec, axis: 1)


def bytes_of(work: RankWork, kind: str) -> float:
    return sum(op.num_bytes for op in work.ops if op.kind == kind)


def test_one_rank_reads_every_weight_once_and_multiplies_it_with_every_token():
    (rank,) = placed(dense())
    work = work_of(rank, Step(3, 1, 10), Widths())
    weights = 2 * LAYER + VOCAB * HIDDEN
    assert bytes_of(work, "linear") == 2 * weights
    assert sum(op.flops for op in work.ops if op.kind == "linear") == 2 * 3 * weights
    assert work.exchanges == () and work.handed_on == () and work.num_layers == 2


def test_a_decode_step_reads_the_keys_and_values_of_its_context_and_writes_its_own():
    (rank,) = placed(dense())
    work = work_of(rank, Step(3, 1, 10), Widths())
    of_a_token = 2 * 2 * KV_HEADS * HEAD * 2  # two layers, keys and values, in bfloat16
    assert bytes_of(work, "attention") == 3 * (11 + 1) * of_a_token
    assert sum(op.flops for op in work.ops if op.kind == "attention") == 2 * 3 * 11 * HEADS * 2 * HEAD * 2


def test_a_prompt_attends_to_half_of_all_pairs_and_computes_logits_of_one_token():
    (rank,) = placed(dense(layers=1))
    work = work_of(rank, Step(1, 100), Widths())
    pairs = 100 * 101 // 2
    assert sum(op.flops for op in work.ops if op.kind == "attention") == 2 * pairs * HEADS * 2 * HEAD
    linear = sum(op.flops for op in work.ops if op.kind == "linear")
    assert linear == 2 * 100 * LAYER + 2 * 1 * VOCAB * HIDDEN


@pytest.mark.parametrize(("context", "tokens", "window"), [(0, 40, 16), (100, 1, 16), (10, 9, 16), (0, 5, 16)])
def test_a_window_bounds_what_queries_see(context, tokens, window):
    (rank,) = placed(dense(layers=1, window=window))
    work = work_of(rank, Step(2, tokens, context), Widths())
    seen = [range(max(0, p - window + 1), p + 1) for p in range(context, context + tokens)]
    of_a_token = 2 * KV_HEADS * HEAD * 2
    read = len({key for keys in seen for key in keys})
    assert bytes_of(work, "attention") == 2 * (read + tokens) * of_a_token
    flops = sum(op.flops for op in work.ops if op.kind == "attention")
    assert flops == 2 * 2 * sum(map(len, seen)) * HEADS * 2 * HEAD


def test_ranks_of_a_stage_share_weights_and_cache_and_add_up_twice_a_layer():
    ranks = placed(dense(), tp=2)
    whole = work_of(placed(dense())[0], Step(3, 1, 10), Widths())
    works = [work_of(rank, Step(3, 1, 10), Widths()) for rank in ranks]
    for kind in ("linear", "attention"):
        assert sum(bytes_of(work, kind) for work in works) == bytes_of(whole, kind)
    row = HIDDEN * 2
    expected = (Exchange("all_reduce", 3 * row),) * (1 + 2 * 2) + (Exchange("all_gather", 3 * VOCAB * 2),)
    assert works[0].exchanges == works[1].exchanges == expected


def test_ranks_that_hold_the_same_key_head_read_it_each():
    whole = work_of(placed(dense())[0], Step(1, 1, 99), Widths())
    works = [work_of(rank, Step(1, 1, 99), Widths()) for rank in placed(dense(), tp=8)]
    assert sum(bytes_of(work, "attention") for work in works) == 2 * bytes_of(whole, "attention")


def test_ranks_that_share_out_tokens_read_each_key_once_and_merge_what_they_attended_to():
    step = Step(3, 1, 99)
    whole = work_of(placed(dense())[0], step, Widths())
    works = [work_of(rank, step, Widths()) for rank in placed(dense(), tp=8, dcp=2)]
    assert sum(bytes_of(work, "attention") for work in works) == bytes_of(whole, "attention")
    flops = [sum(op.flops for op in work.ops if op.kind == "attention") for work in (whole, *works)]
    assert sum(flops[1:]) == flops[0]
    queries, results = Exchange("all_gather", 3 * 2 * HEAD * 2, 2), Exchange("all_to_all", 2 * 3 * (HEAD + 1) * 4, 2)
    assert [one for one in works[0].exchanges if one.ranks] == [queries, results] * 2


def test_shares_may_be_uneven():
    works = [work_of(rank, Step(1), Widths()) for rank in placed(dense(), tp=3)]
    held = [held_bytes(rank.graph, Widths()) for rank in placed(dense(), tp=3)]
    assert works[0].num_bytes > works[2].num_bytes and held[0] > held[2]


def test_a_stage_hands_on_the_residual_stream_and_only_the_last_makes_logits():
    first, last = (work_of(rank, Step(2, 5), Widths()) for rank in placed(dense(), pp=2))
    assert (first.handed_on, last.handed_on) == ((2 * 5 * HIDDEN * 2,), ())
    assert bytes_of(first, "linear") == 2 * LAYER and bytes_of(last, "linear") == 2 * (LAYER + VOCAB * HIDDEN)


def test_weights_of_ranks_add_up_to_those_of_the_model():
    for graph in (dense(), with_experts()):
        whole = held_bytes(graph, Widths())
        stages = [held_bytes(rank.graph, Widths()) for rank in placed(graph, pp=2)]
        assert sum(stages) == whole


def test_a_tied_head_is_held_once_on_one_rank_and_on_both_ends_of_stages():
    embedding = 2 * VOCAB * HIDDEN
    assert held_bytes(dense(), Widths()) - held_bytes(dense(tied=True), Widths()) == embedding
    first, last = (held_bytes(rank.graph, Widths()) for rank in placed(dense(tied=True), pp=2))
    assert first == last
    work = work_of(placed(dense(tied=True), pp=2)[1], Step(1), Widths())
    assert bytes_of(work, "other") == 4 * HIDDEN, "a norm: tokens are embedded in the first stage alone"


def test_widths_are_those_of_what_is_stored():
    (rank,) = placed(dense())
    plain, small = Widths(), Widths(body=4.5, head=8, kv=8)
    less = 2 * LAYER * (16 - 4.5) / 8 + VOCAB * HIDDEN
    assert held_bytes(rank.graph, plain) - held_bytes(rank.graph, small) == pytest.approx(less)
    step = Step(1, 1, 99)
    attention = [bytes_of(work_of(rank, step, widths), "attention") for widths in (plain, small)]
    assert attention[0] == 2 * attention[1]


def test_a_step_reads_the_experts_that_its_tokens_are_routed_to():
    (rank,) = placed(with_experts(layers=1))
    one, many = (work_of(rank, Step(n), Widths()) for n in (1, 1000))
    assert bytes_of(one, "experts") == pytest.approx(TOP * EXPERT * 2)
    assert bytes_of(many, "experts") == pytest.approx(EXPERTS * EXPERT * 2)
    assert sum(op.flops for op in many.ops if op.kind == "experts") == pytest.approx(2 * 1000 * TOP * EXPERT)
    assert one.num_mixtures == 1


def test_cut_experts_are_read_by_every_rank_and_whole_ones_by_their_own():
    step, whole = Step(4), touched_experts(EXPERTS, TOP, 4) * EXPERT * 2
    cut = work_of(placed(with_experts(layers=1), tp=2)[0], step, Widths())
    spread = work_of(placed(with_experts(layers=1), tp=2, ep=2)[0], step, Widths(), ep=2)
    assert bytes_of(cut, "experts") == pytest.approx(whole / 2)
    assert whole / 2 < bytes_of(spread, "experts") < whole
    assert len(cut.exchanges) == len(spread.exchanges)


def test_experts_touched_are_those_of_independent_choices():
    assert touched_experts(128, 8, 1) == pytest.approx(8)
    assert touched_experts(128, 8, 2) == pytest.approx(128 * (1 - (15 / 16) ** 2))
    assert touched_experts(8, 2, 10**6) == 8


@pytest.mark.parametrize(("experts", "shares", "touched"), [(8, 2, 2), (8, 4, 3), (12, 5, 4), (128, 8, 8)])
def test_the_busiest_share_is_the_mean_of_the_largest_count(experts, shares, touched):
    each, larger = divmod(experts, shares)
    owner = [share for share in range(shares) for _ in range(each + (share < larger))]
    rng = random.Random(7)
    counts = []
    for _ in range(20000):
        chosen = [owner[expert] for expert in rng.sample(range(experts), touched)]
        counts.append(max(map(chosen.count, set(chosen))))
    assert busiest_share(experts, shares, touched) == pytest.approx(mean(counts), rel=0.02)


def test_the_busiest_share_of_all_experts_is_the_largest_and_of_one_share_everything():
    assert busiest_share(10, 4, 10) == 3
    assert busiest_share(10, 1, 6.5) == 6.5
    assert busiest_share(8, 2, 2) == pytest.approx(1 + 3 / 7)
    assert busiest_share(8, 2, 2.5) == pytest.approx((busiest_share(8, 2, 2) + busiest_share(8, 2, 3)) / 2)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_an_impossible_step_is_refused(sizes):
    with pytest.raises(ValueError, match="expected at least 1 request"):
        Step(*sizes)
