"""How the findings of a sweep are put into words, on the screen and on the page alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from statistics import median
from typing import Any

from engine.contracts.percentiles import FEWEST
from engine_lab.sweep.analysis import NOT_MEASURED
from engine_lab.sweep.figures import BY_KEY, PERCENTILE
from engine_lab.sweep.race import sets
from engine_lab.sweep.record import Experiment

LATE_MS = 5.0
"""How late the client's event loop may wake before the report says so."""
LEAST_SENDING = 0.25
"""Of a run's time, below which the report says so."""


def conclusion(experiment: Experiment) -> str:
    """The best set, or that there is none, in one line."""
    found = experiment.summary["verdict"]
    names = [one.name for one in experiment.candidates]
    if found["winner"] is not None:
        return f"best: {names[found['winner']]}: {'; '.join(ratio(one, names) for one in found['compared'])}"
    if "ties" in found:
        told = "; ".join(ratio(one, names) for one in found["compared"] if not one["excludes_tie"])
        return f"no best set: {names[found['ranked'][0]]} cannot be told apart from others: {told}"
    return f"no best set: {found['why']}"


def ratio(one: dict[str, Any], names: list[str]) -> str:
    """Of one comparison."""
    return f"{interval(one)} of {names[one['against']]}"


def interval(ratio: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}-{ratio['high']:.3f}]"


def notes(experiment: Experiment) -> list[str]:
    """What is to be known to read the rows, a line each."""
    summary = experiment.summary
    figure = BY_KEY[summary["by"]]
    rounds = ", ".join(f"{kind} {sets(count)} x {passes}" for kind, count, passes in summary["rounds"]) or "none"
    lines = [
        f"load: {summary['load']}",
        f"ordered by {figure.label} ({figure.definition})",
        f"passes: {rounds}; {summary['elapsed_s'] / 60:.1f} of {summary['budget_s'] / 60:.1f} min",
        f"order of the first pass: {experiment.order}",
        "figures: means over runs, next to the last round's sets in the same passes; the verdict is of the last round "
        "alone, at 95 %",
    ]
    if summary["slo"]:
        lines.append(f"SLO: {summary['slo']}, for P{PERCENTILE} of requests")
    if experiment.quality:
        lines.append(f"loss of quality: {experiment.quality}")
    if all(row["figures"]["ttft_p95"] is None for row in summary["rows"] if row["runs"]):
        lines.append(f"TTFT P95 needs {FEWEST[95]} requests a run (--requests, --duration)")
    if (share := sending_share(experiment)) is not None and share < LEAST_SENDING:
        lines.append(
            f"requests took {share:.0%} of a run, the rest is the start of its engine and the warm-up: with more "
            "--requests the same time tells more"
        )
    if (lag := summary["client_lag_ms"]) is not None and lag > LATE_MS:
        lines.append(
            f"the client was late: its event loop woke {lag:.1f} ms late at P99 in the worst run; figures near that are"
            " its own"
        )
    reasons = Counter(reason(row) for row in summary["rows"] if reason(row))
    lines += [f"{count} not measured further: {text}" for text, count in reasons.most_common()]
    return lines


def sending_share(experiment: Experiment) -> float | None:
    """Of the time of a typical run that in which its requests were served; ``None``: not known."""
    runs = [run for run in experiment.runs if run.figures.get("requests_per_s")]
    if not runs or experiment.options.get("trace") or experiment.options.get("duration_s"):
        return None
    requests = int(experiment.options.get("requests", 0))
    return median(requests / (run.figures["requests_per_s"] or inf) / run.seconds for run in runs)


def refusals(experiment: Experiment) -> list[str]:
    """Before anything runs: what of the grid is not going to be measured, a line for each reason."""
    reasons = Counter(one.refused for one in experiment.candidates if one.refused and not experiment.runs_of(one.id))
    return [f"{sets(count)} not measured: {text}" for text, count in reasons.most_common()]


def reason(row: dict[str, Any]) -> str:
    """Why a set has no place in the order."""
    if row["status"] == NOT_MEASURED:
        return "interrupted before it, no time for it (--budget), or not picked (--samples)"
    if row["same_as"] is not None:
        return "the same plan as another set"
    return f"{row['status']}: {row['reason']}" if row["reason"] else ""
