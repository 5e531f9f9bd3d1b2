"""Up to which load the SLO is kept."""

import asyncio

from engine_lab.sweep.record import FINAL, Candidate, Experiment, Round, Run
from engine_lab.tune.headroom import raise_load
from engine_lab.tune.proof import choose
from engine_lab.tune.wording import evidence


def test_the_load_is_raised_until_each_set_misses_the_slo() -> None:
    limits = {0: 1.3, 1: 2.5}
    experiment = Experiment((), {}, [Candidate(0, "baseline", ()), Candidate(1, "chosen", ("x=1",))])
    experiment.rounds = [Round(FINAL, [0, 1], 6, 3)]

    async def make(asked: Round) -> None:
        for number in range(asked.first, asked.first + asked.passes):
            for which in asked.candidates:
                experiment.runs.append(Run(which, number, {"slo": asked.scale / limits[which]}, 1.0))

    kept = {"share": 0.8, "low": 0.7, "high": 0.9, "verdict": "kept"}
    proof = {"chosen": 1, "passes": 6, "figures": {}, "lines": [], "kept": {"baseline": kept, "chosen": kept}}
    found = asyncio.run(raise_load(experiment, proof, make))
    assert found == {"baseline": 1.25, "chosen": 1.25**4}
    assert [one.candidates for one in experiment.rounds[1:]] == [[0, 1], [0, 1], [1], [1], [1]]
    assert "it differs in one line, which brings all of this" in evidence(experiment, proof)
    assert "chosen kept the SLO up to 2.44 times the load" in evidence(experiment, proof | {"headroom": found})


def test_of_sets_that_cannot_be_told_apart_the_one_with_the_fewest_lines_is_chosen() -> None:
    words = ("device=cpu", "drafter=ngram", "scheduler.token_budget=512")
    names = (("baseline", 1), ("two lines", 3), ("one line", 2))
    experiment = Experiment((), {}, [Candidate(i, name, words[:count]) for i, (name, count) in enumerate(names)])
    experiment.rounds = [Round(FINAL, [0, 1, 2], 6, 0)]
    values = {0: 2.0, 1: 0.999, 2: 1.0}
    for number in range(6):
        tilt = {0: 0.0, 1: 0.01 * (number % 2), 2: 0.01 * ((number + 1) % 2)}
        experiment.runs += [Run(i, number, {"slo": values[i] + tilt[i]}, 1.0) for i in range(3)]
    chosen, why = choose(experiment, [])
    assert chosen is not None and chosen.name == "one line" and why == ""
