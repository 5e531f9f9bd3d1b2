"""Optuna's sampler on a grid whose truth is known."""

from __future__ import annotations

from itertools import product
from math import exp, log

import pytest
from tests.lab.sweep.test_race import Truth

from engine_lab.sweep.analysis import verdict


def test_a_sixth_of_a_large_grid_is_enough_to_find_its_best_set_and_an_interruption_changes_nothing() -> None:
    pytest.importorskip("optuna")
    drafters, budgets, rows = ("none", "ngram", "eagle3"), range(128, 2049, 128), (4, 8, 16, 32, 64)
    points = list(product(drafters, budgets, rows))
    figures = [
        100.0 * (1.0 - 0.07 * drafters.index(one)) * exp(0.25 * abs(log(budget / 640)) + 0.2 * abs(log(row / 16)))
        for one, budget, row in points
    ]
    best = points[figures.index(min(figures))]

    def sampled(seed: int, stop_after: int = 10**6) -> Truth:
        truth = Truth(figures, seed, stop_after=stop_after)
        for candidate, (one, budget, row) in zip(truth.experiment.candidates, points, strict=True):
            candidate.words = (f"drafter={one}", f"scheduler.token_budget={budget}", f"scheduler.max_requests={row}")
        return truth

    for seed in range(3):
        experiment = sampled(seed).race(budget_s=3600.0, samples=40)
        first = experiment.rounds[0]
        assert len(first.candidates) == 40 and len({run.candidate for run in experiment.runs}) == 40
        assert points[verdict(experiment, "e2e")["ranked"][0]] == best
    parts = sampled(0, stop_after=25)
    with pytest.raises(KeyboardInterrupt):
        parts.race(budget_s=3600.0, samples=40)
    parts.left = 10**6
    assert parts.race(budget_s=3600.0, samples=40).runs == sampled(0).race(budget_s=3600.0, samples=40).runs
