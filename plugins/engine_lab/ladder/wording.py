"""How figures and findings are put into words, on the screen and on the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from engine.contracts.percentiles import FEWEST
from engine_lab.bench.result import MAX_LAG_MS
from engine_lab.ladder.analysis import BETTER, UNFINISHED, WORSE
from engine_lab.ladder.comparisons import ADDED, ALL, LEFT_OUT
from engine_lab.ladder.figures import FIGURES
from engine_lab.ladder.record import Ladder

SAME_LENGTH = 0.02
"""Up to which answers count as equally long."""
CONCLUDED = ("ttft_p50", "itl", "e2e_p50")
LABELS = {figure.key: figure.label for figure in FIGURES}


def interval(found: dict[str, Any]) -> str:
    """An estimate with its interval."""
    if found["verdict"] == UNFINISHED:
        return f"{found['estimate']:.2f} [unfinished]"
    return f"{found['estimate']:.2f} [{bounds(found)}]"


def bounds(found: dict[str, Any]) -> str:
    """With as many digits as it takes to see on which side of no change they are."""
    low, high = found["low"], found["high"]
    digits = 3 if {0.0, 1.0} & {round(low, 2), round(high, 2)} else 2
    return f"{decimal(low, digits)}{' to ' if low < 0 else '-'}{decimal(high, digits)}"


def decimal(value: float, digits: int) -> str:
    """So many digits after the point, of large values none."""
    return f"{value:.{0 if abs(value) >= 100 else digits}f}"


def outputs(found: dict[str, Any] | None) -> str:
    """How greedy outputs compare with those of the rung below."""
    if found is None:
        return "-"
    if found["equal"] == found["compared"]:
        return f"{found['equal']} of {found['compared']} equal"
    margin = "" if found["margin"] is None else f", margin {found['margin']:.3f}"
    return f"{found['equal']} of {found['compared']} equal; first at token {found['first_token']}{margin}"


def conclusions(ladder: Ladder) -> list[str]:
    """What came out, a line each: by figure what all rungs come to and which of them count, then what to leave out."""
    rows = [row for row in ladder.summary["rows"] if row["figures"]]
    lines = []
    for key in CONCLUDED:
        of_kind = {
            kind: [(row["name"], row["figures"][key]) for row in rows if row["kind"] == kind and key in row["figures"]]
            for kind in (ALL, ADDED, LEFT_OUT)
        }
        said = [f"all rungs {interval(found)} of the baseline, {found['verdict']}" for _, found in of_kind[ALL]]
        for verdict in (BETTER, WORSE):
            if named := _named(of_kind[ADDED], verdict):
                said.append(f"{verdict} with {named}")
        if named := _named(of_kind[LEFT_OUT], WORSE):
            said.append(f"beside all others only worse with {named}")
        if any(of_kind.values()):
            said = said or ["no winner"]
            lines.append(f"{LABELS[key]}: {'; '.join(said)}")
    return lines


def _named(found: Sequence[tuple[str, dict[str, Any]]], verdict: str) -> str:
    """The rungs of a verdict, the largest change first."""
    named = [(name, one["estimate"]) for name, one in found if one["verdict"] == verdict]
    named.sort(key=lambda one: -abs(log(one[1])))
    return ", ".join(f"{name} ({estimate:.2f})" for name, estimate in named)


def beside_study(found: dict[str, Any], is_ratio: bool) -> str:
    """How a change compares with what the case study expects."""
    if found["low"] is None:
        return UNFINISHED
    if found["low"] <= found["expected"] <= found["high"]:
        return "as expected"
    return "gains more" if (found["estimate"] < found["expected"]) == is_ratio else "gains less"


def notes(ladder: Ladder) -> list[str]:
    """What is to be known to read the rows, a line each."""
    summary, options = ladder.summary, ladder.options
    load = f"{options['rate']:g} requests/s" if options["rate"] else f"{options['concurrency']} at once"
    lines = [
        f"workload: runs of {options['requests']} requests, {load}; prompts {options['prompt_tokens']} tokens, "
        f"{options['shared_prefix']:.0%} of them shared; answers up to {options['output_tokens']} tokens",
        f"{options['pairs']} pairs of runs a comparison, in the order ABBA or BAAB; a run is one observation",
        f"level: {summary['level']:.0%} of each interval by itself: among {summary['intervals']} intervals of equal "
        f"engines about {summary['expected_false']:.1f} would name a winner",
    ]
    if options["requests"] < FEWEST[95]:
        lines.append(f"TTFT P95 needs {FEWEST[95]} requests a run (--requests): of fewer it would be the slowest")
    if engine := ladder.engine:
        lines.append(f"device: {engine.device}, {engine.dtype}")
    if machine := ladder.floor:
        lines.append(
            f"machine: reads {machine['read_gb_s']:.1f} GB/s; other load {_load(machine)} while that was measured"
        )
    if (lag := summary["client_lag_ms"]) is not None:
        late = (
            f": above {MAX_LAG_MS:g} ms, smaller differences than that may be the client's" if lag > MAX_LAG_MS else ""
        )
        lines.append(f"client: its event loop woke {lag:.1f} ms late at P99, in the median run{late}")
    if limit := summary["max_tokens"]:
        known = "too few for an interval" if limit["low"] is None else f"{limit['low']}-{limit['high']}"
        lines.append(f"max_tokens: P99 of {limit['observed']} observed answers is {limit['p99']} tokens ({known})")
    if same := summary["same"]:
        named = ", ".join(f"{LABELS[key]} {one['named']}" for key, one in same["by_figure"].items())
        lines.append(
            f"A/A: {same['without_any_winner']} of {same['comparisons']} comparisons of equal engines named no winner "
            f"at all; winners by figure: {named}"
        )
    for one in summary["refused"]:
        lines.append(
            f"refused: {one['name']}: {one['reason'].splitlines()[-1] if one['reason'] else 'no reason given'}"
        )
    for row in summary["rows"]:
        before, after = row["answer_tokens"]
        if before and after and abs(after / before - 1) > SAME_LENGTH:
            lines.append(f"answers: {_row_name(row)}: {after:.1f} tokens instead of {before:.1f}, which E2E includes")
        if row["refused"]:
            lines.append(f"refused: {row['kind']} {row['name']}: {row['refused'].splitlines()[-1]}")
        elif row["pairs"] < row["planned"]:
            lines.append(
                f"unfinished: {row['kind']} {row['name']}: {row['pairs']} of {row['planned']} pairs; no verdict"
            )
    if failed := summary["failed_requests"]:
        lines.append(f"{failed} requests failed: they count in goodput alone")
    return lines


def _row_name(row: dict[str, Any]) -> str:
    return str(row["name"]) if row["kind"] == ALL else f"{row['kind']} {row['name']}"


def _load(machine: dict[str, Any]) -> str:
    return "unknown" if machine["others"] is None else f"{machine['others']:.2f} CPUs"
