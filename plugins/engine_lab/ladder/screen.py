"""The ladder on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine_lab.ladder.analysis import BETTER, UNDECIDED, UNFINISHED, WORSE
from engine_lab.ladder.comparisons import ADDED, ALL, LEFT_OUT
from engine_lab.ladder.figures import FIGURES
from engine_lab.ladder.record import Ladder
from engine_lab.ladder.wording import bounds, conclusions, decimal, notes, outputs

CELLS = 10
"""Of a figure: six of them, and a rung's name, fit 80 columns."""
STYLES = {BETTER: "green", WORSE: "red", UNDECIDED: "dim"}
TITLES = {
    ADDED: "with the rung / without it, added to those above it",
    ALL: "with all rungs / without any",
    LEFT_OUT: "with all rungs / without this one",
}


def render(ladder: Ladder) -> RenderableType:
    """A table of ratios for each kind of comparison, and what is to be known beside them."""
    rows = [row for row in ladder.summary["rows"] if row["figures"]]
    tables = [
        _table(title, [row for row in rows if row["kind"] == kind])
        for kind, title in TITLES.items()
        if any(row["kind"] == kind for row in rows)
    ]
    compared = [
        Text(f"outputs: {row['name']}: {outputs(row['outputs'])}") for row in rows if row["outputs"] is not None
    ]
    told = [*(Text(line) for line in notes(ladder)), *(Text(line, style="bold") for line in conclusions(ladder))]
    return Group(*tables, *compared, *told)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    shown = [figure for figure in FIGURES if any(figure.key in row["figures"] for row in rows)]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("rung", max_width=18, overflow="fold")
    for figure in shown:
        table.add_column(figure.label, width=CELLS, overflow="fold")
    for row in rows:
        table.add_row(row["name"], *(_cell(row["figures"].get(figure.key)) for figure in shown))
    return table


def _cell(found: dict[str, Any] | None) -> Text:
    if found is None:
        return Text("-")
    below = "not done" if found["verdict"] == UNFINISHED else bounds(found)
    if len(below) > CELLS:  # in two lines, neither figure cut
        below = (
            below.replace(" to ", " to\n").replace("-", "-\n") if found["low"] >= 0 else below.replace(" to ", " to\n")
        )
    text = Text(f"{decimal(found['estimate'], 2)}\n{below}", style=STYLES.get(found["verdict"], ""))
    if found["expected"] is not None:
        text.append(f"\nstudy {found['expected']:.2f}", style="dim")
    return text
