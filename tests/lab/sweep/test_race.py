"""Sequential halving with measurements whose truth is known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from math import exp

import pytest

from engine_lab.sweep.analysis import verdict
from engine_lab.sweep.race import Race, whole_passes
from engine_lab.sweep.record import FINAL, SCREENING, Candidate, Experiment, Round, Run
from engine_lab.sweep.rounds import order_of, ranked

RUN_S = 12.0
NOISE, DRIFT = 0.05, 0.2
"""Standard deviations of the logarithm: of a run, and of what all runs of a pass have in common."""


class Truth:
    """Measures sets whose true figures are known."""

    def __init__(self, figures: Sequence[float], seed: int, fails: Sequence[int] = (), stop_after: int = 10**6) -> None:
        self.figures, self.seed, self.fails, self.left = figures, seed, fails, stop_after
        self.lacks: set[int] = set()
        """Passes whose requests have no figure, as a load by time may."""
        self.experiment = Experiment((), {}, [Candidate(i, f"set {i}", (f"x={i}",)) for i in range(len(figures))])

    async def measure(self, which: int, number: int, asked: Round) -> Run:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        common = random.Random(f"{self.seed}/{number}").gauss(0.0, DRIFT)
        own = random.Random(f"{self.seed}/{number}/{which}").gauss(0.0, NOISE)
        failed = "it does not start: no" if which in self.fails else ""
        figures = {} if failed else {"e2e": self.figures[which] * exp(common + own)}
        if number in self.lacks:
            return Run(which, number, {"itl_p95": 1.0}, RUN_S, "too few of its requests have e2e")
        return Run(which, number, figures, RUN_S, failed)

    def race(self, budget_s: float = 900.0, keep: int = 3, samples: int | None = None) -> Experiment:
        def ignored(*words: object) -> None:
            pass

        race = Race(self.experiment, self.measure, "e2e", keep, budget_s, self.seed, ignored, ignored, samples)
        asyncio.run(race.run())
        return self.experiment


def test_the_best_three_of_24_are_found_and_the_best_is_named_within_the_budget() -> None:
    right = named = 0
    for seed in range(20):
        figures = [100.0, 85.0, 75.0, *(100.0 + 5.0 * i for i in range(21))]
        random.Random(seed).shuffle(figures)
        experiment = Truth(figures, seed).race()
        found = verdict(experiment, "e2e")
        best = sorted(range(24), key=lambda i: figures[i])
        right += found["ranked"][:2] == best[:2]
        named += found["winner"] == best[0]
        assert experiment.elapsed_s <= 900.0 and [one.kind for one in experiment.rounds][-1] == FINAL
        assert found["winner"] in (best[0], None)
    assert right >= 18 and named >= 18


def test_equal_sets_have_no_best() -> None:
    """In the last round the best of three must be told from both others, at 95 % each."""
    named = sum(verdict(Truth([100.0] * 12, seed).race(), "e2e")["winner"] is not None for seed in range(200))
    assert named <= 10


def test_what_was_interrupted_goes_on_to_the_same_end() -> None:
    figures = [100.0 + 7.0 * i for i in range(8)]
    whole = Truth(figures, 1).race()
    parts = Truth(figures, 1, stop_after=10)
    with pytest.raises(KeyboardInterrupt):
        parts.race()
    assert len(parts.experiment.runs) == 10
    parts.left = 10**6
    resumed = parts.race()
    assert resumed.runs == whole.runs and resumed.rounds == whole.rounds


def test_a_budget_that_is_spent_names_no_best_and_a_larger_one_goes_on() -> None:
    truth = Truth([100.0, 50.0, 150.0, 200.0], 2)
    short = truth.race(budget_s=100.0)
    found = verdict(short, "e2e")
    assert found["winner"] is None and "passes of the last round were made; --budget 5m goes on" in found["why"]
    assert "made; the same command goes on" in verdict(short, "e2e", budget_s=300.0)["why"]  # as after Ctrl-C
    assert verdict(truth.race(budget_s=300.0), "e2e")["winner"] == 1


def test_sets_that_there_is_no_time_for_are_left_out_and_the_last_round_is_not() -> None:
    experiment = Truth([200.0 - i for i in range(60)], 3).race(budget_s=600.0)
    first, last = experiment.rounds[0], experiment.rounds[-1]
    assert len({run.candidate for run in experiment.runs}) < 60 == len(first.candidates)
    assert last.kind == FINAL and len(whole_passes(experiment, last)) >= 6


def test_a_set_that_fails_is_out_and_says_why() -> None:
    truth = Truth([50.0, 100.0, 120.0, 140.0], 4, fails=[0])
    experiment = truth.race()
    assert experiment.candidates[0].refused == "it does not start: no"
    assert sum(run.candidate == 0 for run in experiment.runs) == 1 and verdict(experiment, "e2e")["winner"] == 1


def test_every_two_passes_are_an_order_and_its_reverse() -> None:
    asked = Round(FINAL, list(range(5)), 6, 1)
    orders = [order_of(0, asked, number) for number in range(2, 6)]
    assert orders[0] == orders[1][::-1] and orders[2] == orders[3][::-1] and orders[0] != orders[2]
    assert order_of(0, Round(SCREENING, [3, 1, 2], 1, 0), 0) == [3, 1, 2]


def test_sets_are_ranked_by_the_passes_that_all_of_them_have() -> None:
    experiment = Experiment((), {}, [Candidate(i, str(i), ()) for i in range(2)])
    experiment.runs = [
        Run(0, 0, {"tokens_per_s": 10.0}, 1.0),
        Run(1, 0, {"tokens_per_s": 20.0}, 1.0),
        Run(0, 1, {"tokens_per_s": 500.0}, 1.0),
    ]
    assert ranked(experiment, [0, 1], "tokens_per_s") == [1, 0]


def test_a_pass_without_the_figure_does_not_count_and_its_sets_stay() -> None:
    truth = Truth([100.0, 50.0, 150.0], 5)
    truth.lacks = {4}
    experiment = truth.race(budget_s=300.0)
    assert not any(one.refused for one in experiment.candidates)
    assert 4 not in whole_passes(experiment, experiment.rounds[-1]) and verdict(experiment, "e2e")["winner"] == 1
    truth = Truth([100.0, 50.0, 150.0], 5)
    truth.lacks = set(range(20))
    assert all(one.refused for one in truth.race().candidates)
