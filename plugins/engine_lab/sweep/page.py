"""The report of a sweep: one page that needs neither network nor scripts."""

from __future__ import annotations

from typing import Any

from engine_lab.shared.chart import ticks
from engine_lab.shared.document import document
from engine_lab.shared.markup import Markup, joined, table, tag
from engine_lab.sweep.figures import figure_of
from engine_lab.sweep.record import Experiment
from engine_lab.sweep.screen import beside, shown
from engine_lab.sweep.wording import conclusion, notes

WIDTH, HEIGHT, MARGIN, TOP = 760, 380, 60, 30


def page(experiment: Experiment) -> str:
    """The whole page. Its data, all runs included, is in it as JSON."""
    return document("Sweep of plugin sets", _sections(experiment), experiment)


def _sections(experiment: Experiment) -> list[Markup]:
    rows = experiment.summary["rows"]
    measured = [row for row in rows if row["runs"]]
    parts = [
        tag("h1", f"Sweep of {len(rows)} plugin sets"),
        tag("p", "Words: ", tag("code", " ".join(experiment.words)), class_="lead"),
        tag("p", conclusion(experiment)),
        tag("ul", *(tag("li", line) for line in notes(experiment)), class_="notes"),
    ]
    if any(row["figures"]["ttft_p95"] and row["figures"]["itl_p95"] for row in measured):
        caption = "Green: no other set is at least as good in TTFT, ITL, output, memory and loss, and better in one."
        parts += [tag("h2", "TTFT and ITL"), tag("figure", pareto_plot(measured), tag("figcaption", caption))]
    return [*parts, tag("h2", "All sets"), _table(rows, experiment.summary["figures"])]


def _table(rows: list[dict[str, Any]], keys: list[str]) -> Markup:
    head = [
        "",
        "plugin set",
        *(f"{one.label} ({one.unit})" for one in map(figure_of, keys)),
        "memory (MiB)",
        "loss",
        "runs",
        "",
    ]
    body = []
    for place, row in enumerate(rows, 1):
        name = tag("span", row["name"], class_="better" if row["pareto"] else None)
        figures = [shown(row["figures"][key]) for key in keys]
        said = joined(row["status"], tag("small", row["reason"])) if row["reason"] else row["status"]
        body.append([str(place), name, *figures, *beside(row), str(row["runs"]), said])
    return table(head, body)


def pareto_plot(rows: list[dict[str, Any]]) -> Markup:
    """TTFT P95 to the right, ITL P95 upwards, a circle for each set with its place in the table."""
    places = [(place, row, row["figures"]["ttft_p95"], row["figures"]["itl_p95"]) for place, row in enumerate(rows, 1)]
    points = [(place, row, x, y) for place, row, x, y in places if x and y]
    x_ticks, y_ticks = ticks(max(point[2] for point in points)), ticks(max(point[3] for point in points))
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + x / x_ticks[-1] * (right - MARGIN), bottom - y / y_ticks[-1] * (bottom - TOP)

    parts = [
        tag("line", x1=MARGIN, y1=bottom, x2=right, y2=bottom, class_="axis"),
        tag("line", x1=MARGIN, y1=TOP, x2=MARGIN, y2=bottom, class_="axis"),
        tag("text", "TTFT P95 (ms)", x=(MARGIN + right) / 2, y=HEIGHT - 15, class_="title"),
        tag("text", "ITL P95 (ms)", x=MARGIN, y=14, class_="title"),
    ]
    parts += [tag("text", shown(x), x=f"{at(x, 0)[0]:.0f}", y=bottom + 16, class_="tick") for x in x_ticks]
    parts += [tag("text", shown(y), x=MARGIN - 25, y=f"{at(0, y)[1] + 4:.0f}", class_="tick") for y in y_ticks]
    for place, row, x, y in points:
        cx, cy = at(x, y)
        label = tag("title", f"{row['name']}: TTFT P95 {shown(x)} ms, ITL P95 {shown(y)} ms")
        circle = tag("circle", label, cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=5)
        number = tag("text", str(place), x=f"{cx + 7:.1f}", y=f"{cy + 4:.1f}", class_="value")
        parts.append(tag("g", circle, number, class_="better" if row["pareto"] else "undecided"))
    picture = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", width=WIDTH, height=HEIGHT)
    return tag("div", picture, class_="scroll", tabindex=0)
