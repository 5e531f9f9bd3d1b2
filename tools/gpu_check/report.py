"""The JSON report and the one table at the end."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gpu_check.conductor import Outcome
from gpu_check.section import Row, Section, show_best, show_floor, show_value


def failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a check failed or a section that matters did not finish."""
    return any(outcome.failed for outcome in outcomes)


def as_json(
    device: dict[str, Any], when: Sequence[str], outcomes: Sequence[Outcome], left_out: Sequence[Section]
) -> dict[str, Any]:
    """Everything, for the file. ``when``: it was begun, and gone on with."""
    return {
        "when": when[0],
        "resumed": list(when[1:]),
        "device": device,
        "passed": not failed(outcomes),
        "sections": {
            outcome.section.name: {
                "what": outcome.section.doc,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 1),
                "budget_s": outcome.section.budget_s,
                "reason": outcome.reason,
                "rows": [dataclasses.asdict(row) for row in outcome.rows],
            }
            for outcome in outcomes
        },
        "not_measured": [section.name for section in left_out],
    }


def write(report: dict[str, Any], folder: Path) -> Path:
    """``<device>-<date>.json``"""
    path = folder / f"{file_stem(report['device']['name'])}-{report['when'][:10]}.json"
    # In two steps: a run that is cut off here must not lose what it had written.
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    return unfinished.replace(path)


def file_stem(device: str) -> str:
    """A device's name in the names of its reports."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def newest(device: str, folder: Path) -> Path | None:
    """The last report of a device in a folder."""
    days = "[0-9]" * 4 + "-[0-9][0-9]" * 2
    return max(folder.glob(f"{file_stem(device)}-{days}.json"), default=None)


def table(outcomes: Sequence[Outcome], left_out: Sequence[Section]) -> Table:
    result = Table("section", "metric", title="gpu_check", title_justify="left")
    for name in ("measured", "floor", "best known", "limit", "share of limit", "target", "held"):
        result.add_column(name, justify="right")
    for outcome in outcomes:
        for row in outcome.rows:
            result.add_row(outcome.section.name, *cells(row))
        if outcome.status != "ok":
            # Text, not markup: logs are full of brackets.
            cells_of = (outcome.section.name, Text(outcome.reason), outcome.status, "", "", "", "", "")
            result.add_row(*cells_of, "" if outcome.section.is_optional else "no", style="bold red")
    for section in left_out:
        result.add_row(section.name, section.doc, "not measured", "", "", "", "", "", "")
    return result


def cells(row: Row) -> tuple[str | Text, ...]:
    held = "" if row.held is None else "yes" if row.held else Text("no" if row.is_check else "missed", style="bold red")
    why = f" ({row.detail})" if row.measured is None and row.detail else ""
    return (
        Text(row.metric + why),
        show_value(row),
        show_floor(row),
        show_best(row),
        "" if row.limit is None else f"{row.limit:,.4g} {row.unit}",
        "" if row.share is None else f"{row.share:.0%}",
        row.target,
        held,
    )


def legend(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table's bars are: one line for each figure that somebody is known to have."""
    lines = [
        "floor: by the card's data sheet; without one, the limit. limit: by rates measured in this run. "
        "A check's bar is its target."
    ]
    known = [row for outcome in outcomes for row in outcome.rows if row.best_known]
    return lines + [f"best known, {row.metric}: {show_best(row)}, {(row.best_known or {})['of']}" for row in known]
