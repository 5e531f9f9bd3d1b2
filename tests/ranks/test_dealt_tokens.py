"""Ranks share out the tokens of large steps (prefill context parallelism), and say what one rank says.

All in float32, with blocks of 8 tokens. Where experts are spread over these ranks, too, their tokens are gathered in
front of the experts and summed after them.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.contracts.ops import Experts, GatherTokens, OwnExperts, SumTokens
from engine.models.layout import Layout
from engine.models.placement import place
from engine.ranks.context_parallel import Piece, pieces_of
from tests.plugins.architecture import test_families_with_experts as experts
from tests.plugins.architecture import test_nested_families as nested
from tests.plugins.architecture import test_recurrent_families as recurrent
from tests.plugins.architecture.family import Family
from tests.ranks.answers import answers, assert_same_but_for_ties, plan_of
from tests.selection import few

TOGETHER = ("parallelism=threads", "communicator=simulated")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("counts", [(1,), (2, 1, 1), (100, 7), (1,) * 9, (64,)])
def test_every_token_is_computed_once_and_ranks_attend_to_as_many_keys(counts: tuple[int, ...], ranks: int) -> None:
    pieces = pieces_of(counts, ranks)
    tokens = [(piece.row, piece.first + i) for of_rank in pieces for piece in of_rank for i in range(piece.size)]
    assert sorted(tokens) == [(row, i) for row, count in enumerate(counts) for i in range(count)]
    if counts == (64,):
        keys = [sum(piece.first + i + 1 for piece in of_rank for i in range(piece.size)) for of_rank in pieces]
        assert max(keys) - min(keys) <= 64


def test_rows_of_one_token_are_dealt_in_turn() -> None:
    assert pieces_of((1, 1, 1), 2) == [[Piece(0, 0, 1), Piece(2, 0, 1)], [Piece(1, 0, 1)]]


CASES = [
    pytest.param(experts.TestDeepSeek, "deepseek_v2", ("pcp=2", "ep=2", "pcp_min_tokens=9"), (), id="latent, experts"),
    pytest.param(
        experts.TestDeepSeek, "deepseek_v3", ("tp=2", "pcp=2", "ep=4", "pcp_min_tokens=2"), ("overlap=false",),
        id="latent, experts on all ranks, decoding rows",
    ),
    pytest.param(
        experts.TestGptOss, "gpt_oss", ("pcp=2", "ep=2", "pcp_min_tokens=9"),
        ("scheduler=chunked_prefill", "scheduler.token_budget=24"), id="sinks, windows, fused experts",
    ),
    pytest.param(nested.TestGemma, "gemma2", ("pcp=3", "pcp_min_tokens=6"), ("kv_format=int8",), id="int8 keys"),
]  # fmt: skip


@few(1)
@pytest.mark.parametrize(("family", "name", "layout", "overrides"), CASES)
def test_ranks_that_share_out_tokens_say_what_one_rank_says(
    family: type[Family], name: str, layout: tuple[str, ...], overrides: tuple[str, ...], checkpoints: Any
) -> None:
    """Prefixes that are cached included: every text is asked for twice."""
    with checkpoints(family, name) as (model, _, _):
        common = ("model.max_len=128", *overrides)
        alone = answers(plan_of(model.path, *common))
        ranks = [f"parallelism.{size}" for size in layout]
        assert_same_but_for_ties(answers(plan_of(model.path, *common, *TOGETHER, *ranks)), alone)


@pytest.mark.slow
def test_processes_that_share_out_tokens_say_what_one_process_says() -> None:
    common = ("model.max_len=512", "drafter=ngram", "scheduler=chunked_prefill", "scheduler.token_budget=48")
    alone = answers(plan_of("bundled", *common))
    ranks = ("parallelism=local", "parallelism.pcp=2", "parallelism.pcp_min_tokens=12")
    assert_same_but_for_ties(answers(plan_of("bundled", *common, *ranks)), alone)


def test_experts_are_spread_over_the_ranks_of_a_stage(checkpoints: Any) -> None:
    with checkpoints(experts.TestDeepSeek, "deepseek_v2") as (_, graph, _):
        ranks = place(graph, Layout(pcp=2, ep=2), lambda spec, axis: 1)
    whole = next(node.op.num_experts for node in graph.nodes if isinstance(node.op, Experts))
    held = []
    for rank in ranks:
        (layer, *_) = [layer for layer in rank.graph.layers if any(isinstance(n.op, Experts) for n in layer.nodes)]
        kinds = [type(node.op) for node in layer.nodes]
        at = kinds.index(OwnExperts)
        assert kinds[at - 3 : at + 3] == [GatherTokens, GatherTokens, GatherTokens, OwnExperts, Experts, SumTokens]
        held += [node.op.num_experts for node in layer.nodes if isinstance(node.op, Experts)]
    assert sum(held) == whole


def test_recurrent_layers_are_refused(checkpoints: Any) -> None:
    with (
        checkpoints(recurrent.TestQwenNext, "qwen3_next") as (_, graph, _),
        pytest.raises(ValueError, match=r"parallelism\.pcp=2: recurrent layers .*; use parallelism\.pcp=1"),
    ):
        place(graph, Layout(pcp=2), lambda spec, axis: 1)
