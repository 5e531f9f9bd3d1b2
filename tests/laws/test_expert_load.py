"""Where experts are changes no token: ranks that hold experts by load say what one rank says. What is counted is what
routers choose."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tools.benchmarks.families import TESTS, suites
from tools.benchmarks.ranks import LAYOUTS, communicator
from torch import Tensor

from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Experts
from engine.kernels.settings import Kernels
from engine.kernels.torch import experts
from engine.models.expert_load import ExpertLoad, counted, in_order, layers_with_experts
from engine.models.fused_experts import is_fused
from engine.testing.paged_loop import PagedLoop, loaded
from engine.testing.ranks import Ranks, compare, logits, steps_of
from tests.laws.test_ranks import DRIFT, TYPICAL
from tests.needs import needs_compiler
from tests.selection import few

FAMILIES = {"Qwen3MoeForCausalLM": False, "GptOssForCausalLM": True}
"""Whether the checkpoint has all experts of a layer in one tensor."""
STEPS = steps_of([[7 * i % 96 for i in range(23)], [11 * i % 96 for i in range(15)]], (9, 1, 5))
NUM_TOKENS = 23 + 15


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[ModelFacts, Graph]]:
    (suite,) = (
        suite
        for suite in suites([TESTS / "test_families_with_experts.py"])
        if any(suite.config(name).architecture == request.param for name in suite.models())
    )
    name = next(name for name in suite.models() if suite.config(name).architecture == request.param)
    with suite.checkpoint(name) as (facts, graph, _):
        op = next(node.op for node in graph.nodes if isinstance(node.op, Experts))
        assert is_fused(op, open_checkpoint(facts.path).names) == FAMILIES[request.param]
        yield facts, graph


def skewed(graph: Graph) -> ExpertLoad:
    """Some experts are chosen far more often than others."""
    chance = random.Random(7)
    sizes = layers_with_experts(graph).items()
    return {layer: [int(1000 * chance.random() ** 4) for _ in range(count)] for layer, count in sizes}


@few(4)
@pytest.mark.parametrize("layout", ["ep 2", "tp 4 x ep 2"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_ranks_with_experts_by_load_choose_the_tokens_of_one(
    layout: str, kernels: Kernels, model: tuple[ModelFacts, Graph]
) -> None:
    want = logits(PagedLoop(loaded(*model, kernels)), STEPS)
    with Ranks(*model, LAYOUTS[layout], communicator, kernels=kernels, load=skewed(model[1])) as ranks:
        found = compare(want, ranks.logits(STEPS))
        held = [node.op.held for node in ranks.placed[0].graph.nodes if isinstance(node.op, Experts)]
    assert all(one is not None for one in held)
    assert any(one.numbers != in_order(one.whole, 2)[0] for one in held if one is not None), "placed as without a load"
    assert found.is_one and found.equal_but_for_ties
    assert found.drift <= DRIFT and found.typical <= TYPICAL


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_counts_are_those_of_what_routers_choose(
    kernels: Kernels, model: tuple[ModelFacts, Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, graph = model
    chosen: list[Tensor] = []

    def route(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = original(*arguments)  # type: ignore[arg-type]
        chosen.append(ids)
        return ids, weights

    original = experts.route
    monkeypatch.setattr(experts, "route", route)
    logits(PagedLoop(loaded(facts, graph)), STEPS)
    sizes = layers_with_experts(graph)
    want = {
        layer: tuple(torch.cat(chosen[number :: len(sizes)]).flatten().bincount(minlength=count).tolist())
        for number, (layer, count) in enumerate(sizes.items())
    }
    lowered = loaded(facts, counted(graph, 99), kernels)
    logits(PagedLoop(lowered), STEPS)
    found = lowered.expert_load()
    assert found == want and all(sum(counts) == NUM_TOKENS * top_k(graph) for counts in found.values())
    lowered.forget_expert_load()
    assert not any(map(sum, lowered.expert_load().values()))


def top_k(graph: Graph) -> int:
    return next(node.op.top_k for node in graph.nodes if isinstance(node.op, Experts))
