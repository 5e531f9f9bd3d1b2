"""Experts are dealt to shares by how often they are chosen; a load that is not the model's is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.assembly.errors import AssemblyError
from engine.assembly.expert_load import read_expert_load
from engine.contracts.config import ParallelismConfig
from engine.contracts.graph import Builder, Graph
from engine.contracts.ops import CountExperts, Experts, Gated, HeldExperts, LinearPart, LinearSpec, OwnExperts, Route
from engine.models.expert_load import busiest_expert, by_load, counted, imbalance, in_order
from engine.models.fused_experts import fused_cuts, fused_layers
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.testing.plain import PlainQuantizer
from tests.models.test_placement import mixture, unit

LOADS = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40)
SKEWED = (9, 8, 7, 1, 1, 1)


@given(LOADS, st.integers(1, 8))
def test_every_expert_is_on_one_share_and_shares_are_as_large_as_in_order(loads: list[int], shares: int) -> None:
    spread, plain = by_load(loads, shares), in_order(len(loads), shares)
    assert sorted(expert for share in spread for expert in share) == list(range(len(loads)))
    assert [len(share) for share in spread] == [len(share) for share in plain]
    assert all(list(share) == sorted(share) for share in spread)
    assert [expert for share in plain for expert in share] == list(range(len(loads)))
    assert max(map(len, plain)) - min(map(len, plain)) <= 1


def test_the_busiest_experts_go_to_different_shares() -> None:
    assert by_load(SKEWED, 3) == ((0, 5), (1, 4), (2, 3))
    assert by_load((4, 4, 4, 4), 2) == ((0, 2), (1, 3)), "of equals the first comes first"
    assert by_load((100, 1, 1, 1), 2) == ((0, 3), (1, 2)), "a share that is full takes no more"


def test_what_the_busiest_share_gets_is_summed_over_layers() -> None:
    """In order 17 of a mean of 9, and 10 of a mean of 5: in each layer all wait for its busiest share."""
    assert imbalance({1: SKEWED, 4: (5, 5, 5, 0, 0, 0)}, 3) == ((17 + 10) / 14, (10 + 5) / 14)
    assert busiest_expert((6, 0, 0)) == 3.0 and busiest_expert((0, 0)) == 0.0


# -- placed


def held(rank: RankGraph) -> HeldExperts:
    (op,) = (node.op for node in rank.graph.nodes if isinstance(node.op, Experts))
    (own,) = (node.op for node in rank.graph.nodes if isinstance(node.op, OwnExperts))
    assert op.held == own.held and op.held is not None and op.num_experts == len(op.held.numbers)
    return op.held


def test_ranks_read_the_experts_that_they_are_dealt() -> None:
    graph = mixture(experts=6)
    ranks = place(graph, Layout(4, 1, 2), unit, load={0: SKEWED})
    spread = by_load(SKEWED, 2)
    assert spread != in_order(6, 2)
    assert [held(rank).numbers for rank in ranks] == [spread[0], spread[0], spread[1], spread[1]]
    for rank in ranks:
        (op,) = (node.op for node in rank.graph.nodes if isinstance(node.op, Experts))
        assert [up.parts[0].name for up, _ in op.each] == [f"{i}.gate" for i in held(rank).numbers]


def test_of_tensors_that_hold_all_experts_only_a_share_s_rows_are_read() -> None:
    (op,) = (node.op for node in mixture(experts=6, fused=True).nodes if isinstance(node.op, Experts))
    (stored, *_) = PlainQuantizer().stored(LinearSpec((LinearPart("x", 1),), 1))
    for numbers, ranges in (((0, 1, 4), ((0, 2), (4, 5))), ((2, 3, 5), ((2, 4), (5, 6))), ((1, 2), ((1, 3),))):
        own = with_held(op, HeldExperts(numbers, 6))
        assert fused_cuts(own, fused_layers(own)[0], stored) == [(0, ranges)]


def with_held(op: Experts, experts: HeldExperts) -> Experts:
    return replace(op, held=experts, num_experts=len(experts.numbers))


REFUSED: dict[str, tuple[dict[int, tuple[int, ...]], str]] = {
    "another number of experts": ({0: (1, 2, 3)}, "layer 0 has 3 counts, and the model has 6 experts there"),
    "another layer": ({1: SKEWED}, "has layers 1, and the model has experts in layers 0"),
    "more layers": ({0: SKEWED, 3: SKEWED, 4: SKEWED}, "has layers 0, 3-4, and the model has experts in layers 0"),
    "no layer": ({}, "has layers none, and the model has experts in layers 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_load_of_another_model_is_refused(name: str) -> None:
    load, says = REFUSED[name]
    with pytest.raises(ValueError, match=f"parallelism.expert_load: {says}; measure it with this model"):
        place(mixture(experts=6), Layout(2, 1, 2), unit, load=load)


# -- counted


def test_counting_is_right_after_the_choice_and_changes_nothing_else() -> None:
    graph = mixture(experts=6)
    found = counted(graph, 32)
    nodes = found.layers[0].nodes
    at = next(i for i, node in enumerate(nodes) if isinstance(node.op, CountExperts))
    assert isinstance(nodes[at - 1].op, Route) and nodes[at].inputs == nodes[at - 1].outputs[:1]
    assert nodes[at].op == CountExperts(0, 6, 32) and nodes[at].outputs == ()
    assert (*nodes[:at], *nodes[at + 1 :]) == graph.layers[0].nodes


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallelism.count_experts=true: the model has no experts; leave it out"):
        counted(without_experts(), 32)


def without_experts() -> Graph:
    b = Builder()
    x = b.embed("embed", 60, 8)
    with b.layer(x):
        x = b.add(x, b.gated(x, x, Gated("silu").act))
    b.lm_head(x, "head", 60)
    return b.graph()


# -- settings and files


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"count_experts": True, "pp": 2}, r"count_experts=true parallelism.tp=1 parallelism.pp=2: one rank counts"),
        ({"count_experts": True, "pcp": 2}, r"count_experts=true .*parallelism.pcp=2: one rank counts"),
        ({"expert_load": "x.json", "tp": 2}, r"expert_load=x.json: says .* and parallelism.ep=1; set parallelism.ep"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"parallelism.{says}"):
        ParallelismConfig(**sizes)


FILES = {
    "no JSON": ("layers", "JSON is malformed"),
    "something else": ("[1]", "Expected `object`, got `array`"),
    "no layers": ("{}", "missing required field `layers`"),
    "negative": ('{"layers": {"0": [1, -1]}}', "Expected `int` >= 0"),
    "fractions": ('{"layers": {"0": [1.5]}}', "Expected `int`, got `float`"),
    "no number of a layer": ('{"layers": {"a": [1]}}', "Expected `int`, got `str`"),
    "no token": ('{"layers": {"0": [0, 0]}}', "no expert was chosen while it was measured"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_load_are_refused(name: str, tmp_path: Any) -> None:
    text, says = FILES[name]
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(AssemblyError) as refused:
        read_expert_load(str(file))
    (problem,) = refused.value.problems
    assert problem.startswith(f"parallelism.expert_load={file}: ") and says in problem
    assert "expected the JSON that GET /engine/expert_load answers with" in problem


def test_a_file_that_is_not_there_is_named(tmp_path: Any) -> None:
    with pytest.raises(AssemblyError, match=r"missing.json: No such file or directory; expected the JSON"):
        read_expert_load(str(tmp_path / "missing.json"))


def test_the_answer_of_the_server_is_read_whatever_else_it_says(tmp_path: Any) -> None:
    file = tmp_path / "load.json"
    file.write_text('{"layers": {"3": [1, 2]}, "busiest_over_mean": {"3": 1.3}, "more": 1}')
    assert read_expert_load(str(file)) == {3: (1, 2)}
