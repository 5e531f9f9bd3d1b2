"""The order of the first pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lab.sweep.test_report import options

from engine.contracts.step_cost import StepCost
from engine_lab.shared.simulation.plans import most_blocks, resolve
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.sweep import order
from engine_lab.sweep.load import trace_of
from engine_lab.sweep.order import order_candidates, simulated_load
from engine_lab.sweep.record import Candidate, Experiment

COSTS = {"seed=1": 9.0, "seed=2": 3.0, "seed=3": 6.0}
"""Of a step, in ms, by a word of each set."""


def experiment() -> Experiment:
    return Experiment((), {}, [Candidate(i, word, ("device=cpu", word)) for i, word in enumerate(COSTS)])


@pytest.mark.parametrize("by", ["e2e", "ttft_p95", "itl_p95", "tokens_per_s", "slo"])
def test_sets_that_a_simulation_finds_better_come_first(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    plan = resolve(["device=cpu"]).plan

    def spec_of(words: Sequence[str], config_dirs: Any) -> EngineSpec:
        return EngineSpec(plan, most_blocks(plan), StepCost(COSTS[words[1]], 0.01, num_samples=1))

    monkeypatch.setattr(order, "spec_of", spec_of)
    found = experiment()
    asked = options("--by", by, "--slo", "ttft=1s", "--concurrency", "3", "--output-tokens", "8")
    assert order_candidates(found, asked) == [1, 2, 0] and "by simulation" in found.order


def test_without_measured_steps_the_order_is_random_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "spec_of", lambda words, config_dirs: None)
    found = experiment()
    orders = {tuple(order_candidates(experiment(), options("--seed", str(seed)))) for seed in range(9)}
    assert len(orders) > 1 and sorted(order_candidates(found, options())) == [0, 1, 2]
    assert "random, of seed 0: what steps cost was not measured with seed=" in found.order


def test_a_closed_loop_is_simulated_as_one() -> None:
    load = options("--concurrency", "2", "--requests", "5").load
    assert [one.after for one in simulated_load(load)] == [(), (), ("0",), ("1",), ("2",)]
    assert trace_of(load) is None


def test_a_trace_without_times_needs_a_rate(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 12}]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([{"id": i, "conversations": turns} for i in range(3)]))
    with pytest.raises(ValueError, match="it has no times; expected --rate R beside it"):
        trace_of(options("--trace", str(path)).load)
    assert (sent := trace_of(options("--trace", str(path), "--rate", "2").load)) is not None and sent[1].arrival_s > 0
