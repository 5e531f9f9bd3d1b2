"""The largest step and its captures are measured before the pool takes the memory they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.assembly.bind import bind
from engine.contracts.graph import Graph
from engine.kernels.model import LoweredModel
from engine.startup.memory.budget import Meter
from engine.startup.memory.profile_run import profile_run
from engine.startup.rank import load_plan
from engine.step.graphs import Bucket
from tests.exact_model import ExactModel
from tests.kernels import tiny
from tests.selection import few

from .test_memory import plan_of, planned


class Gauge(Meter):
    """Reads what a script says."""

    def __init__(self, used: int, peak: int) -> None:
        self._readings = (used, peak)

    def used(self) -> int:
        return self._readings[0]

    def peak(self) -> int:
        return self._readings[1]

    def reset_peak(self) -> bool:
        return True


@few(1)
@pytest.mark.parametrize("overrides", [("scheduler.token_budget=300",), ("scheduler.max_requests=2",)])
def test_a_step_that_fills_the_budget_runs_on_a_pool_of_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    plan = plan_of(tiny.write(tmp_path), "model.max_len=64", *overrides)
    bound, memory = bind(plan), planned(plan)
    model = load_plan(plan, bound)
    taken = memory.estimate.workspace + 500
    sizes: list[int] = []
    forward = LoweredModel.forward

    def watched(self: LoweredModel, batch: object, *rest: object) -> object:
        sizes.append(batch.token_ids.shape[0])  # type: ignore[attr-defined]
        return forward(self, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LoweredModel, "forward", watched)
    got = profile_run(memory, bound, model, [], run_once, lambda device: 0, Gauge(100, 100 + taken))
    assert sizes == [min(int(plan.choice("scheduler").config["token_budget"]), 64 * bound.context.max_requests)]
    assert (got.estimate.workspace, got.estimate.graphs, got.estimate.loading) == (taken, 0, 0)
    assert got.estimate.weights == memory.estimate.weights


def test_every_graph_beyond_the_largest_counts_as_much_as_the_second(tmp_path: Path) -> None:
    plan = plan_of(tiny.write(tmp_path), "model.max_len=32", "scheduler.token_budget=32", "attention_kernel=torch")
    bound = bind(plan)
    captured: list[str] = []
    free = iter([1000, 900, 893])
    model = StubModel(120, captured)
    model.graph = load_plan(plan, bound).graph
    buckets = [Bucket(1, 1), Bucket(8, 1), Bucket(4, 1), Bucket(2, 1)]
    got = profile_run(planned(plan), bound, model, buckets, run_once, lambda device: next(free), Gauge(0, 0))  # type: ignore[arg-type]
    assert captured == ["8", "4"]
    assert got.estimate.graphs == 100 + 7 + 2 * 7


def test_the_buckets_with_the_most_logits_are_captured_beside_longer_prompts(tmp_path: Path) -> None:
    plan = plan_of(tiny.write(tmp_path), "model.max_len=32", "scheduler.token_budget=32", "attention_kernel=torch")
    bound = bind(plan)
    captured: list[str] = []
    model = StubModel(120, captured)
    model.graph = load_plan(plan, bound).graph
    decode, prompts = [Bucket(1, 1), Bucket(8, 1), Bucket(4, 1)], [Bucket(1, n, prompt=True) for n in (16, 32)]
    free = iter([1000, 900, 890, 850, 847])
    buckets = [*decode, *prompts]
    got = profile_run(planned(plan), bound, model, buckets, run_once, lambda device: next(free), Gauge(0, 0))  # type: ignore[arg-type]
    assert captured == ["32", "16", "8", "4"]
    assert got.estimate.graphs == 100 + 10 + 40 + 3 + 3


def run_once(step: Callable[[], None]) -> Callable[[], None]:
    step()
    return step


class StubModel(ExactModel):
    """Notes the size of what is captured; the profile run's pool is not one of exact integers."""

    def __init__(self, vocab_size: int, captured: list[str]) -> None:
        super().__init__(vocab_size)
        self.captured = captured
        self.graph: Graph

    def forward(self, batch: object, kv: object, aux_layers: object = ()) -> object:  # type: ignore[override]
        return torch.zeros(batch.token_ids.shape[0], 1, dtype=torch.float64), []  # type: ignore[attr-defined]

    def run(self, batch: object, kv: object, prepared: object, aux_layers: object = ()) -> object:  # type: ignore[override]
        self.captured.append(str(batch.token_ids.shape[0]))  # type: ignore[attr-defined]
        return self.forward(batch, kv)
