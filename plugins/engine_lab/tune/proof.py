"""What was chosen, and whether fresh runs prove it."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from engine_lab.shared.statistics import hodges_lehmann, paired_ratio
from engine_lab.sweep.analysis import last_round, verdict
from engine_lab.sweep.figures import Figure, figure_of, keys_of
from engine_lab.sweep.race import whole_passes
from engine_lab.sweep.record import PROOF, Candidate, Experiment, Round
from engine_lab.sweep.rounds import LEAST_FINAL, MOST_FINAL, after, seconds_of
from engine_lab.tune.lines import WITHOUT, baseline_of, left_out, lines_of

BY = "slo"
KEPT = {
    "kept": "the baseline keeps the SLO",
    "not kept": "the baseline does not keep the SLO",
    "undecided": "whether the baseline keeps the SLO is undecided",
}


def choose(experiment: Experiment, config_dirs: Sequence[Path], share: float = 1.0) -> tuple[Candidate | None, str]:
    """Of the sets that the sweep cannot tell from the best, the one with the fewest lines; none, and why.
    ``share``: of the budget that the sweep has."""
    found = verdict(experiment, BY, share)
    if not found["compared"]:
        return None, found["why"]
    best, baseline = found["ranked"][0], baseline_of(experiment)
    tied = [experiment.candidates[one] for one in (best, *found.get("ties", ()))]
    if baseline in tied:
        last = last_round(experiment)
        assert last is not None  # it was compared
        kept = _kept(experiment, baseline.id, whole_passes(experiment, last))
        return None, f"the baseline is the best, or cannot be told apart from it; {KEPT[kept['verdict']]}"
    return min(tied, key=lambda one: len(lines_of(one, baseline, config_dirs))), ""


def proof_round(
    experiment: Experiment, chosen: Candidate, lines: Sequence[str], config_dirs: Sequence[Path], budget_s: float
) -> Round:
    """The baseline, the chosen set, and it without each of its lines, which become sets of the experiment."""
    baseline = baseline_of(experiment)
    further = left_out(experiment, chosen, lines, config_dirs)
    experiment.candidates += further
    members = [baseline.id, chosen.id, *(one.id for one in further)]
    cost = len(members) * seconds_of(experiment, [baseline.id, chosen.id])
    passes = int((budget_s - experiment.elapsed_s) // cost)
    return Round(PROOF, members, min(MOST_FINAL, max(LEAST_FINAL, passes)), after(experiment.rounds[-1]))


def prove(experiment: Experiment, asked: Round) -> dict[str, Any]:
    """What the round says: ratios of the chosen set to the baseline by figure, whether it is proven, what each line
    brings, and whether the SLO is kept."""
    baseline, chosen, *others = (experiment.candidates[one] for one in asked.candidates)
    numbers = whole_passes(experiment, asked)
    found: dict[str, Any] = {
        "chosen": chosen.id,
        "passes": len(numbers),
        "figures": {},
        "lines": [],
        "is_proven": False,
    }
    if chosen.refused or baseline.refused or len(numbers) < LEAST_FINAL:
        needed = (LEAST_FINAL - len(numbers)) * len(asked.candidates) * seconds_of(experiment, asked.candidates)
        why = f"{len(numbers)} of {LEAST_FINAL} passes of the proof were made; a --budget "
        why += f"{needed / 60:.0f} minutes longer goes on"
        return found | {"why": chosen.refused or baseline.refused or why}
    known = [key for number in numbers for key in experiment.runs_of(chosen.id)[number].figures]
    for figure in map(figure_of, keys_of(known)):
        if (ratio := _ratio(experiment, figure, baseline.id, chosen.id, numbers)) is not None:
            found["figures"][figure.key] = ratio
    slo = found["figures"][BY]
    found["is_proven"] = slo["high"] < 1.0
    found["kept"] = {one.name: _kept(experiment, one.id, numbers) for one in (baseline, chosen)}
    keeps = KEPT[found["kept"][baseline.name]["verdict"]]
    found["why"] = "" if found["is_proven"] else f"fresh runs do not tell it from the baseline; {keeps}"
    for one in others:
        ratio = None if one.refused else _ratio(experiment, figure_of(BY), one.id, chosen.id, numbers)
        found["lines"].append({"line": one.name.removeprefix(WITHOUT), "refused": one.refused, "ratio": ratio})
    return found


def _ratio(
    experiment: Experiment, figure: Figure, before: int, after_: int, numbers: Sequence[int]
) -> dict[str, float] | None:
    """Of a figure, as it is read; ``None``: not known in every run."""
    sides = [
        [experiment.runs_of(one)[number].figures.get(figure.key) for number in numbers] for one in (before, after_)
    ]
    known = [[value for value in side if value] for side in sides]
    if any(len(side) < len(numbers) for side in known):
        return None
    ratio = paired_ratio(known[0], known[1])
    assert ratio.interval is not None  # of at least LEAST_FINAL pairs
    return {
        "before": median(known[0]),
        "after": median(known[1]),
        "ratio": ratio.value,
        "low": ratio.interval.low,
        "high": ratio.interval.high,
    }


def _kept(experiment: Experiment, which: int, numbers: Sequence[int]) -> dict[str, Any]:
    """How much of its limits a set takes, at P95 of requests: the typical run with its interval."""
    values = [experiment.runs_of(which)[number].figures[BY] or 0.0 for number in numbers]
    found = hodges_lehmann([log(value) for value in values])
    assert found.interval is not None
    low, high = exp(found.interval.low), exp(found.interval.high)
    said = "kept" if high <= 1.0 else "not kept" if low > 1.0 else "undecided"
    return {"share": exp(found.value), "low": low, "high": high, "verdict": said}
