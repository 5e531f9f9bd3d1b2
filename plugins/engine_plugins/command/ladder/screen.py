"""The ladder on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine_plugins.command.ladder.analysis import BETTER, UNDECIDED, WORSE
from engine_plugins.command.ladder.figures import FIGURES
from engine_plugins.command.ladder.record import Ladder
from engine_plugins.command.ladder.wording import interval, notes, outputs

STYLES = {BETTER: "green", WORSE: "red", UNDECIDED: "dim"}


def render(ladder: Ladder) -> RenderableType:
    """A table of ratios, and what is to be known beside it."""
    summary = ladder.summary
    shown = [f for f in FIGURES if any(f.key in row["figures"] for row in summary["rows"])]
    table = Table(title=f"{ladder.model}: after / before [{summary['level']:.0%} interval]", title_justify="left")
    table.add_column("")
    table.add_column("rung")
    for figure in shown:
        table.add_column(figure.label)
    table.add_column("outputs")
    for row in summary["rows"]:
        cells = [_cell(row["figures"].get(figure.key)) for figure in shown]
        table.add_row(row["kind"], row["name"], *cells, "refused" if row["refused"] else outputs(row["outputs"]))
    return Group(table, *(Text(line) for line in notes(ladder)))


def _cell(found: dict[str, Any] | None) -> Text:
    if found is None:
        return Text("-")
    text = Text(interval(found), style=STYLES.get(found["verdict"], ""))
    if found["expected"] is not None:
        text.append(f"\nseed {found['expected']:.2f}", style="dim")
    return text
