"""Ranks with the same key-value heads cache different tokens (decode context parallelism), and say what one rank says.

All in float32, with blocks of 8 tokens: texts lie over many of them, and begin and end inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engine.assembly.bind import bind
from engine.contracts.communicator import Communicator, World
from engine.contracts.config import CommunicatorConfig, SlotConfig
from engine.contracts.graph import Graph, KVSpec
from engine.contracts.model import ModelFacts
from engine.contracts.ops import SharedAttention
from engine.contracts.quantizer import Quantizer
from engine.kernels.loading import load_model
from engine.kernels.settings import Kernels
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.sharding import smallest_cut
from engine.startup.memory.budget import DoesNotFit
from engine.startup.memory.fit import plan_memory
from engine.startup.placing import placed
from engine.testing.attention_cases import PlainFormat
from engine.testing.context import build_context
from engine.testing.paged_loop import BLOCK, PagedLoop, loaded
from engine.testing.plain import PlainAttention, PlainQuantizer
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.communicator.simulated import SimulatedCommunicator
from tests.kernels import tiny
from tests.plugins.architecture import test_families_with_experts as experts
from tests.plugins.architecture import test_nested_families as nested
from tests.plugins.architecture.family import Family
from tests.ranks.answers import TOKENS, answers, assert_same_but_for_ties, plan_of
from tests.selection import few

T = TypeVar("T")
KERNELS = {"plain": PlainAttention, "torch": lambda: TorchAttention(SlotConfig(), build_context())}


def graphs(graph: Graph, layout: Layout) -> tuple[RankGraph, ...]:
    return place(graph, layout, partial(smallest_cut, PlainQuantizer()))


def on_ranks(
    model: ModelFacts, graph: Graph, layout: Layout, attention: Callable[[], Any], use: Callable[[PagedLoop], T],
    kernels: Kernels = "torch", communicator: Callable[..., Communicator] = SimulatedCommunicator,
    quantizer: Callable[[], Quantizer] = PlainQuantizer,
) -> tuple[T, ...]:  # fmt: skip
    """What comes of the same on every rank, a thread each."""
    ranks, found, failed = graphs(graph, layout), dict[int, T](), list[BaseException]()
    meeting = [communicator(CommunicatorConfig(), build_context()) for _ in ranks]
    worlds = [World(rank, layout.size, layout.groups(rank), "cpu", 30.0) for rank in range(layout.size)]
    invitation = meeting[0].invite(worlds[0])

    def run(rank: int) -> None:
        communicator = meeting[rank]
        try:
            communicator.start(worlds[rank], invitation)
            plugins = quantizer(), attention(), PlainFormat()
            own = load_model(
                model, graph, *plugins, "float32", "cpu", kernels=kernels, own=ranks[rank].graph,
                collectives=communicator,
            )  # fmt: skip
            with torch.inference_mode():
                found[rank] = use(PagedLoop(own))
        except BaseException as error:
            failed.append(error)
            communicator.abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(layout.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return tuple(found[rank] for rank in range(layout.size))


def story(loop: PagedLoop) -> Tensor:
    """Logits of prompts in chunks, of decodes across the borders of stretches and blocks, of drafts of which some are
    rejected and others computed in their place, and of a text that goes on from a cached prefix."""
    made, first, second = list[Tensor](), loop.add(), loop.add()
    made += loop.logits([(first, TOKENS[:13])])
    made += loop.logits([(first, TOKENS[13:14]), (second, TOKENS[5:8])])
    made += loop.logits([(first, TOKENS[14:40]), (second, TOKENS[8:9])])
    for token in TOKENS[40:50]:
        made += loop.logits([(second, [token + 1]), (first, [token])])
    made += loop.logits([(first, TOKENS[50:55])])
    loop.lengths[first] -= 4  # rejected, across the border of a stretch
    made += loop.logits([(first, TOKENS[52:56]), (second, TOKENS[:1])])
    third = loop.continued(first, 3 * BLOCK + 5)
    made += loop.logits([(third, TOKENS[20:31]), (first, TOKENS[56:])])
    return torch.cat(made)


CASES = [
    pytest.param(experts.TestDeepSeek, "deepseek_v2", Layout(tp=2, dcp=2), "torch", id="latent-2"),
    pytest.param(experts.TestDeepSeek, "deepseek_v3", Layout(tp=4, dcp=4), "plain", id="latent-4"),
    pytest.param(experts.TestDeepSeek, "deepseek_v3", Layout(tp=4, dcp=2, ep=2), "torch", id="latent-2-of-4"),
    pytest.param(experts.TestGptOss, "gpt_oss", Layout(tp=4, dcp=2), "torch", id="sinks-and-windows"),
    pytest.param(nested.TestGemma, "gemma by old keys", Layout(tp=2, dcp=2), "plain", id="one-key-head"),
    pytest.param(nested.TestGemma, "gemma2", Layout(tp=4, dcp=2), "torch", id="soft-cap-and-windows"),
]


@pytest.mark.parametrize(("family", "name", "layout", "kernel"), CASES)
def test_ranks_that_cache_different_tokens_compute_what_one_rank_computes(
    family: type[Family], name: str, layout: Layout, kernel: str, checkpoints: Any
) -> None:
    with checkpoints(family, name) as (model, graph, _):
        want = story(PagedLoop(loaded(model, graph)))
        found = on_ranks(model, graph, layout, KERNELS[kernel], story)
    for logits in found:
        assert torch.equal(logits, found[0]), "the same bits on every rank"
    assert (found[0] - want).abs().max() < 1e-5 * want.abs().max()


def test_each_rank_caches_its_stretch_of_every_block(tmp_path: Path) -> None:
    plan = plan_of(tiny.write(tmp_path))
    graph = bound_graph(plan)
    for rank, own in enumerate(graphs(graph, Layout(tp=4, dcp=2))):
        specs = [spec for spec in own.graph.caches if isinstance(spec, KVSpec)]
        assert all(spec.num_kv_heads == 1 for spec in specs)
        assert {(spec.tokens.ranks, spec.tokens.index) for spec in specs if spec.tokens} == {(2, rank % 2)}
        shared = [node for node in own.graph.nodes if isinstance(node.op, SharedAttention)]
        assert len(shared) == len(specs)
        for node in shared:
            assert isinstance(node.op, SharedAttention) and node.heads is not None
            assert node.op.attention.num_heads == 2 and node.op.shares == ((0, 1), (1, 2))
            assert node.heads == (rank, rank + 1, 4)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=2, dcp=2), "with parallelism.tp=2 each of the model's 2 key-value heads is on 1 rank; "
         "parallelism.dcp=1 would fit"),
        (Layout(tp=4, dcp=4), "each of the model's 2 key-value heads is on 2 ranks; parallelism.dcp=1, 2 would fit"),
        (Layout(tp=3, dcp=3), "is on 1 or 2 ranks; parallelism.dcp=1 would fit"),
    ],
)  # fmt: skip
def test_ranks_that_hold_different_heads_cannot_share_tokens(layout: Layout, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        graphs(bound_graph(plan_of(tiny.write(tmp_path))), layout)


def test_a_model_of_windows_alone_has_no_tokens_to_share_out(tmp_path: Path) -> None:
    options = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    with pytest.raises(ValueError, match="no layer of the model attends to every token"):
        graphs(bound_graph(plan_of(tiny.write(tmp_path, **options))), Layout(tp=4, dcp=2))


def test_a_drafter_that_reads_what_the_model_caches_is_refused() -> None:
    plan = plan_of("bundled", "parallelism.tp=4", "parallelism.dcp=2", "drafter=early_exit")
    with pytest.raises(DoesNotFit, match=r"drafter=early_exit .* use parallelism.dcp=1 or another drafter"):
        placed(plan, bind(plan))


def test_the_same_memory_is_for_as_many_times_more_tokens(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)

    def tokens(dcp: int) -> int:
        plan = plan_of(folder, "parallelism.tp=4", f"parallelism.dcp={dcp}")
        bound = bind(plan)
        found = plan_memory(plan, bound, free=1 << 34, own=placed(plan, bound)[0])
        pool = found.estimate.pool
        return (pool.fitting(1 << 24, 1 << 20) - 1) * pool.block_size

    assert tokens(1) <= tokens(2) / 2 + 8 and tokens(2) / 2 <= tokens(1) + 8


SETS = {
    "overlap": (),
    "no overlap, small chunks": ("overlap=false", "scheduler=chunked_prefill", "scheduler.token_budget=24"),
    "preempted": ("scheduler=continuous", "kv_allocator=paged", "memory.kv_tokens=128"),
    "ngram": ("drafter=ngram", "drafter.adaptive=false"),
}


@few(1)
@pytest.mark.parametrize("name", SETS)
def test_an_engine_whose_ranks_share_latent_keys_says_what_one_rank_says(name: str, checkpoints: Any) -> None:
    """Prefixes that are cached included: every text is asked for twice."""
    with checkpoints(experts.TestDeepSeek, "deepseek_v2") as (model, _, _):
        common = ("model.max_len=128", *SETS[name])
        preempted = name == "preempted"
        alone = answers(plan_of(model.path, *common), preempted)
        layout = ("parallelism=threads", "communicator=simulated", "parallelism.tp=2", "parallelism.dcp=2")
        assert_same_but_for_ties(answers(plan_of(model.path, *common, *layout), preempted), alone)


@pytest.mark.slow
def test_processes_that_share_tokens_say_what_one_process_says() -> None:
    common = ("model.max_len=512", "drafter=ngram", "scheduler=chunked_prefill", "scheduler.token_budget=48")
    alone = answers(plan_of("bundled", *common))
    ranks = ("parallelism=local", "parallelism.tp=4", "parallelism.dcp=2")
    assert_same_but_for_ties(answers(plan_of("bundled", *common, *ranks)), alone)


def bound_graph(plan: Any) -> Graph:

    return bind(plan).graph
