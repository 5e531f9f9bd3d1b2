"""From a sweep's runs to the rows of its report: plain data, the same on the screen, on the page and in the files."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from engine_lab.shared.statistics import paired_ratio
from engine_lab.sweep.figures import BY_KEY, keys_of
from engine_lab.sweep.options import SweepOptions
from engine_lab.sweep.race import whole_passes
from engine_lab.sweep.record import FINAL, SCREENING, Candidate, Experiment, Round, Run
from engine_lab.sweep.rounds import LEAST_FINAL, after, ranked, seconds_of

TOKENS = 8192
"""KV tokens that memory is told with: engines fill what is free with more."""
NOT_MEASURED = "not measured"
PARETO = ("ttft_p95", "itl_p95", "tokens_per_s", "memory", "loss")
Row = dict[str, Any]


def summarise_sweep(experiment: Experiment, options: SweepOptions) -> dict[str, Any]:
    """Rows, the best first, the verdict, and what is to be known beside them."""
    found = verdict(experiment, options.by, options.share, options.budget_s)
    keys = keys_of(key for run in experiment.runs for key in run.figures)
    rows = [row(experiment, one, options.by, keys) for one in experiment.candidates if not one.is_beside]
    mark_pareto(rows)
    places = {which: place for place, which in enumerate(found["ranked"])}
    rows.sort(key=lambda one: (places.get(one["id"], len(places)), one["value"] is None, one["value"] or 0.0))
    lags = [run.client_lag_ms for run in experiment.runs if run.client_lag_ms is not None]
    return {
        "by": options.by,
        "figures": keys,
        "load": str(options.load),
        "slo": options.limits,
        "budget_s": options.budget_s / options.share,
        "elapsed_s": experiment.elapsed_s,
        "verdict": found,
        "rows": rows,
        "rounds": [[one.kind, len(one.candidates), len(whole_passes(experiment, one))] for one in experiment.rounds],
        "client_lag_ms": max(lags, default=None),
    }


def row(experiment: Experiment, one: Candidate, by: str, keys: Sequence[str]) -> Row:
    """A set: what became of it, and its figures."""
    runs = swept_runs(experiment, one.id)
    value = adjusted(experiment, one.id, by)
    figures = {key: adjusted(experiment, one.id, key) for key in (*keys, "ttft_p50", "itl_p50", "e2e_p95")}
    return {
        "id": one.id,
        "name": one.name,
        "overrides": list(one.words),
        "status": status(experiment, one),
        "same_as": one.same_as,
        "reason": one.refused,
        "runs": len(runs),
        "figures": figures,
        "value": None if value is None else BY_KEY[by].worse(value),
        "memory": memory(one.facts),
        "loss": one.loss,
        "predicted": one.predicted,
        "facts": one.facts,
        "pareto": False,
    }


def status(experiment: Experiment, one: Candidate) -> str:
    if one.same_as is not None:
        return f"the same plan as {experiment.candidates[one.same_as].name}"
    if one.refused:
        return "refused" if not any(run.candidate == one.id for run in experiment.runs) else "failed"
    if not experiment.runs_of(one.id):
        return NOT_MEASURED
    last = last_round(experiment)
    if last is not None and one.id in last.candidates:
        return "last round"
    rounds = [each for each in experiment.rounds if each.kind == SCREENING and one.id in each.candidates]
    return f"out after round {len(rounds)}"


def last_round(experiment: Experiment) -> Round | None:
    """The one that decides, if it has begun."""
    return next((one for one in experiment.rounds if one.kind == FINAL), None)


def adjusted(experiment: Experiment, which: int, key: str) -> float | None:
    """The geometric mean over a set's runs. Passes send different requests, and sets that were dropped have fewer: each
    run counts as a ratio to those of the last round's sets in the same pass. ``None``: not known."""
    runs = {number: run.figures.get(key) for number, run in swept_runs(experiment, which).items()}
    values = {number: log(value) for number, value in runs.items() if value}
    if not values or len(values) < len(runs):
        return None
    last = last_round(experiment)
    left = [one for one in last.candidates if not experiment.candidates[one].refused] if last else []
    levels: dict[int, list[float]] = {}
    for one in left:
        for number, run in swept_runs(experiment, one).items():
            if value := run.figures.get(key):
                levels.setdefault(number, []).append(log(value))
    level = {number: fmean(found) for number, found in levels.items() if len(found) == len(left)}
    common = values.keys() & level.keys()
    if not common:
        return exp(fmean(values.values()))
    return exp(fmean(values[number] - level[number] for number in common) + fmean(level.values()))


def swept_runs(experiment: Experiment, which: int) -> dict[int, Run]:
    """By number of their pass, as far as the last round; what comes after it is for :mod:`engine_lab.tune`."""
    last = last_round(experiment)
    runs = experiment.runs_of(which)
    return {number: run for number, run in runs.items() if last is None or number < after(last)}


def memory(facts: dict[str, float | None]) -> float | None:
    """Bytes with so many KV tokens as :data:`TOKENS`."""
    planned, kv, tokens = (facts.get(key) for key in ("planned_bytes", "kv_bytes", "kv_tokens"))
    if planned is None or kv is None or not tokens:
        return None
    return planned - kv + kv / tokens * TOKENS


def mark_pareto(rows: Sequence[Row]) -> None:
    """Sets than which no other one is at least as good in every figure and better in one; figures that are not known of
    every set do not count."""
    shown = [row for row in rows if row["runs"] and not row["reason"]]
    values = {row["id"]: [pareto_value(row, key) for key in PARETO] for row in shown}
    known = [i for i in range(len(PARETO)) if all(found[i] is not None for found in values.values())]
    points = {which: [found[i] for i in known] for which, found in values.items()}
    for row in shown:
        mine = points[row["id"]]
        row["pareto"] = not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in points.values()
        )


def pareto_value(row: Row, key: str) -> Any:
    """So that less is better; ``None``: not known."""
    value = row["figures"][key] if key in row["figures"] else row[key]
    return -value if key == "tokens_per_s" and value is not None else value


def verdict(experiment: Experiment, by: str, share: float = 1.0, budget_s: float = 0.0) -> dict[str, Any]:
    """The best set, if the intervals of its ratios to all others of the last round leave out 1; else who it cannot be
    told apart from. Runs of earlier rounds, by which those sets were chosen, do not count. ``budget_s``: what the sweep
    may take, which is not spent after an interruption."""
    last = last_round(experiment)
    found: dict[str, Any] = {"winner": None, "ranked": [], "compared": [], "passes": 0, "why": ""}
    if last is None:
        return found | {"why": "the last round did not begin"}
    numbers = whole_passes(experiment, last)
    left = [one for one in last.candidates if not experiment.candidates[one].refused]
    found |= {"ranked": ranked(experiment, left, by), "passes": len(numbers)}
    if len(left) < 2:
        return found | {"why": "fewer than two sets served the load"}
    if len(numbers) < LEAST_FINAL:
        missing = (LEAST_FINAL - len(numbers)) * len(left) * seconds_of(experiment, left)
        needed_s = experiment.elapsed_s + missing
        way = "the same command" if needed_s <= budget_s else f"--budget {-(-needed_s // (60 * share)):.0f}m"
        why = f"{len(numbers)} of {LEAST_FINAL} passes of the last round were made; {way} goes on"
        return found | {"why": why}
    scores = {one: fmean(log(v) for v in finals(experiment, one, by, numbers)) for one in left}
    order = sorted(left, key=lambda one: scores[one])
    found["ranked"] = order
    found["compared"] = [compared(experiment, order[0], other, by, numbers) for other in order[1:]]
    ties = [one["against"] for one in found["compared"] if not one["excludes_tie"]]
    if not ties:
        return found | {"winner": order[0], "why": "its ratio to each other set of the last round leaves out 1"}
    return found | {"ties": ties, "why": "the ratio of the first to others of the last round does not leave out 1"}


def finals(experiment: Experiment, which: int, by: str, numbers: Sequence[int]) -> list[float]:
    """A set's figure in these passes, so that less is better."""
    runs = experiment.runs_of(which)
    return [BY_KEY[by].worse(runs[number].figures[by] or 0.0) for number in numbers]


def compared(experiment: Experiment, first: int, other: int, by: str, numbers: Sequence[int]) -> dict[str, Any]:
    """The ratio of the figure of ``first`` to that of ``other``, below 1 where the first is better."""
    ratio = paired_ratio(finals(experiment, other, by, numbers), finals(experiment, first, by, numbers))
    interval = ratio.interval
    return {
        "first": first,
        "against": other,
        "ratio": ratio.value,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "excludes_tie": ratio.excludes(1.0) and ratio.value < 1.0,
    }
