"""Which sets are measured next, and how often: sequential halving within a budget of time. Nothing here measures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil, inf, log, log2
from statistics import fmean

from engine_lab.sweep.figures import BY_KEY
from engine_lab.sweep.record import FINAL, SCREENING, Experiment, Round

LEAST_FINAL = 6
"""Passes of the last round: with fewer pairs there is no interval at 95 %."""
MOST_FINAL = 16
MOST_SCREENING = 6


def next_round(experiment: Experiment, by: str, keep: int, budget_s: float) -> Round | None:
    """``None``: the last round was the final one, or nothing can be measured."""
    if not experiment.rounds:
        able = [one.id for one in experiment.able()]
        if len(able) <= keep:
            return final(experiment, able, budget_s)
        return Round(SCREENING, able, 1, 0)
    last = experiment.rounds[-1]
    if last.kind != SCREENING:
        return None
    left = ranked(experiment, last.candidates, by)
    survivors = left[: max(keep, ceil(len(left) / 2))]
    if len(survivors) > keep:
        reserve = keep * LEAST_FINAL * seconds_of(experiment, left[:keep])
        spare = budget_s - experiment.elapsed_s - reserve
        halvings = ceil(log2(len(survivors) / keep))
        passes = int(spare / halvings // (len(survivors) * seconds_of(experiment, survivors)))
        if passes >= 1:
            return Round(SCREENING, survivors, min(passes, MOST_SCREENING), after(last))
    return final(experiment, left[:keep], budget_s)


def final(experiment: Experiment, candidates: list[int], budget_s: float) -> Round | None:
    """The round that decides. Its passes are counted before any of them is looked at."""
    if not candidates:
        return None
    passes = MOST_FINAL
    if cost := len(candidates) * seconds_of(experiment, candidates):
        passes = int((budget_s - experiment.elapsed_s) // cost)
    first = after(experiment.rounds[-1]) if experiment.rounds else 0
    return Round(FINAL, candidates, min(MOST_FINAL, max(LEAST_FINAL, passes)), first)


def after(last: Round) -> int:
    """Number of the pass that comes after a round."""
    return last.first + last.passes


def seconds_of(experiment: Experiment, candidates: Sequence[int]) -> float:
    """Mean of a run of these sets so far; 0: there are none."""
    found = [run.seconds for run in experiment.runs if run.candidate in candidates]
    return fmean(found) if found else 0.0


def ranked(experiment: Experiment, candidates: Sequence[int], by: str) -> list[int]:
    """The best first, by the mean logarithm over the passes that all of them have; sets without a run that counts are
    left out."""
    able = [one for one in candidates if not experiment.candidates[one].refused]
    runs = {one: found for one in able if (found := experiment.runs_of(one))}
    common = set.intersection(*(set(found) for found in runs.values())) if runs else set()
    values = {one: [found[number].figures.get(by) for number in common] for one, found in runs.items()}
    scores = {one: fmean(log(BY_KEY[by].worse(v)) if v else inf for v in found) for one, found in values.items()}
    return sorted((one for one in scores if scores[one] < inf), key=lambda one: scores[one])


def order_of(seed: int, asked: Round, number: int) -> list[int]:
    """In which order the sets of a round run in a pass. The first pass of all keeps the order of the round; every two
    further ones are a random order and its reverse, so that a steady drift of the machine meets all alike."""
    if number == 0:
        return list(asked.candidates)
    order = list(asked.candidates)
    random.Random(f"{seed}/{number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order
