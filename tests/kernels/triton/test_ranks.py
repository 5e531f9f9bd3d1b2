"""Ranks that share out experts, and the tokens they cache, say what one rank says, on Triton kernels.

Runs in Triton's interpreter (see ``tests/interpreted.py``), of which there is one in a process: ranks are threads that
compute in turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelFacts
from engine.kernels.model import LoweredModel
from engine.models.layout import Layout
from engine.testing.context import build_context
from engine.testing.paged_loop import PagedLoop, loaded
from engine_plugins.attention_kernel.triton.kernel import TritonAttention
from engine_plugins.communicator.simulated import SimulatedCommunicator
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.unquantized import Unquantized
from tests.launches import count_launches
from tests.plugins.architecture import test_families_with_experts as families
from tests.plugins.architecture.family import Family
from tests.ranks.answers import TOKENS
from tests.ranks.conftest import checkpoints
from tests.ranks.test_shared_tokens import on_ranks

assert checkpoints, "a fixture"
TURN = threading.Semaphore(1)
"""Whoever holds it computes."""


class InTurns(SimulatedCommunicator):
    """A rank computes from its start to its end, but while it waits for others."""

    def start(self, *args: Any) -> None:
        super().start(*args)
        TURN.acquire()

    def abort(self, why: str) -> None:
        """Called where it fails."""
        super().abort(why)
        TURN.release()


def _lets_others_compute(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def waiting(*args: Any, **options: Any) -> Any:
        TURN.release()
        try:
            return call(*args, **options)
        finally:
            TURN.acquire()

    return waiting


for _name in ("all_reduce", "all_gather", "all_to_all"):
    setattr(InTurns, _name, _lets_others_compute(getattr(SimulatedCommunicator, _name)))


def story(loop: PagedLoop) -> tuple[Tensor, LoweredModel, list[str]]:
    """Logits of a prompt, of a decode beside another prompt, of drafts, and of a decode alone, of which the launches
    are counted."""
    for layer in loop.kv.layers.values():
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    made, first, second = list[Tensor](), loop.add(), loop.add()
    made += loop.logits([(first, TOKENS[:21])])
    made += loop.logits([(first, TOKENS[21:22]), (second, TOKENS[5:8])])
    made += loop.logits([(second, TOKENS[8:9]), (first, TOKENS[22:25])])
    with count_launches() as launches:
        made += loop.logits([(first, TOKENS[25:26])])
    return torch.cat(made), loop.model, launches.names


def kernel_for(model: ModelFacts) -> TritonAttention:
    return TritonAttention(SlotConfig(), replace(build_context(), model=model, dtype="float32"), num_sms=4)


def unquantized() -> Unquantized:
    return Unquantized(UnquantizedConfig(), build_context())


CASES = [
    pytest.param(families.TestDeepSeek, "deepseek_v3", Layout(tp=2, dcp=2, ep=2), id="latent"),
    pytest.param(families.TestGptOss, "gpt_oss", Layout(tp=4, dcp=2, ep=2), id="uneven experts, sinks and windows"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "layout"), CASES)
def test_ranks_compute_what_one_rank_computes_and_wait_for_nothing(
    family: type[Family], name: str, layout: Layout, checkpoints: Any
) -> None:
    with checkpoints(family, name) as (model, graph, _):
        want, _, _ = story(PagedLoop(loaded(model, graph)))

        def turn(loop: PagedLoop) -> tuple[Tensor, LoweredModel, list[str]]:
            made = story(loop)
            TURN.release()
            return made

        found = on_ranks(model, graph, layout, lambda: kernel_for(model), turn, "triton", InTurns, unquantized)
    for logits, lowered, launches in found:
        assert torch.equal(logits, found[0][0]), "the same bits on every rank"
        assert not lowered.waits, "so that a CUDA graph can hold a step"
        assert {"choose_experts", "expert_gate", "expert_mix", "split_attention"} <= set(launches)
        assert any(line.startswith("router, route, own_experts: ") for line in lowered.lowering)
    assert (found[0][0] - want).abs().max() < 1e-5 * want.abs().max()
