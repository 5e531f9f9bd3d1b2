"""A sweep on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine_lab.sweep.figures import BY_KEY
from engine_lab.sweep.record import Experiment
from engine_lab.sweep.wording import conclusion, notes

MIB = 2.0**20
COLUMNS = ("ttft_p95", "itl_p95", "tokens_per_s")


def render(experiment: Experiment) -> RenderableType:
    """The sets that were measured, what is to be known beside them, and the verdict."""
    summary = experiment.summary
    rows = [row for row in summary["rows"] if row["runs"]]
    keys = [summary["by"], *(key for key in COLUMNS if key != summary["by"])]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("plugin set", min_width=18, overflow="fold")
    for key in keys:
        table.add_column(f"{BY_KEY[key].label}\n{BY_KEY[key].unit}", justify="right")
    table.add_column("memory\nMiB", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("runs", justify="right")
    for row in rows:
        figures = [shown(row["figures"][key]) for key in keys]
        style = "bold" if row["id"] == summary["verdict"]["winner"] else ""
        name = ("* " if row["pareto"] else "") + row["name"].replace(" ", "\n")
        table.add_row(Text(name), *figures, *beside(row), str(row["runs"]), style=style)
    star = Text("* no other set is at least as good in TTFT, ITL, output, memory and loss, and better in one")
    told: list[RenderableType] = [Text(line) for line in notes(experiment)]
    tables: list[RenderableType] = [table, star] if rows else []
    return Group(*tables, *told, Text(conclusion(experiment), style="bold"))


def beside(row: dict[str, Any]) -> tuple[str, str]:
    """Memory and loss of quality."""
    memory = "-" if row["memory"] is None else f"{row['memory'] / MIB:,.0f}"
    return memory, "-" if row["loss"] is None else f"{row['loss']:.2%}"


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
