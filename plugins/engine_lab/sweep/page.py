"""The report of a sweep: one page that needs neither network nor scripts."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from engine_lab.ladder.markup import Markup, joined, table, tag
from engine_lab.ladder.page import CSS
from engine_lab.sweep.figures import BY_KEY
from engine_lab.sweep.record import Experiment
from engine_lab.sweep.screen import beside, shown
from engine_lab.sweep.wording import conclusion, notes

WIDTH, HEIGHT, MARGIN = 760, 380, 60


def page(experiment: Experiment) -> str:
    """The whole page. Its data, all runs included, is in it as JSON."""
    css = CSS.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    # "<" would end the element, wherever it stands in a string.
    data = Markup(msgspec.json.encode(experiment).decode().replace("<", "\\u003c"))
    head = joined(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", "Sweep of plugin sets"),
        tag("style", Markup(css)),
    )
    body = tag("main", *_sections(experiment), tag("script", data, type="application/json", id="data"))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


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
    return [*parts, tag("h2", "All sets"), _table(rows)]


def _table(rows: list[dict[str, Any]]) -> Markup:
    head = [
        "",
        "plugin set",
        *(f"{one.label} ({one.unit})" for one in BY_KEY.values()),
        "memory (MiB)",
        "loss",
        "runs",
        "",
    ]
    body = []
    for place, row in enumerate(rows, 1):
        name = tag("span", row["name"], class_="better" if row["pareto"] else None)
        figures = [shown(row["figures"][key]) for key in BY_KEY]
        said = joined(row["status"], tag("small", row["reason"])) if row["reason"] else row["status"]
        body.append([str(place), name, *figures, *beside(row), str(row["runs"]), said])
    return table(head, body)


def pareto_plot(rows: list[dict[str, Any]]) -> Markup:
    """TTFT P95 to the right, ITL P95 upwards, a circle for each set with its place in the table."""
    places = [(place, row, row["figures"]["ttft_p95"], row["figures"]["itl_p95"]) for place, row in enumerate(rows, 1)]
    points = [(place, row, x, y) for place, row, x, y in places if x and y]
    most_x, most_y = max(point[2] for point in points) * 1.08, max(point[3] for point in points) * 1.08
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    parts = [
        tag("line", x1=MARGIN, y1=bottom, x2=right, y2=bottom, class_="axis"),
        tag("line", x1=MARGIN, y1=10, x2=MARGIN, y2=bottom, class_="axis"),
        tag("text", "TTFT P95 (ms)", x=(MARGIN + right) / 2, y=HEIGHT - 15, class_="title"),
        tag("text", "ITL P95 (ms)", x=MARGIN + 50, y=16, class_="title"),
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = MARGIN + share * (right - MARGIN), bottom - share * (bottom - 10)
        parts.append(tag("text", shown(share * most_x), x=f"{x:.0f}", y=bottom + 16, class_="tick"))
        parts.append(tag("text", shown(share * most_y), x=MARGIN - 25, y=f"{y + 4:.0f}", class_="tick"))
    for place, row, x, y in points:
        cx, cy = MARGIN + x / most_x * (right - MARGIN), bottom - y / most_y * (bottom - 10)
        label = tag("title", f"{row['name']}: TTFT P95 {shown(x)} ms, ITL P95 {shown(y)} ms")
        circle = tag("circle", label, cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=5)
        number = tag("text", str(place), x=f"{cx + 7:.1f}", y=f"{cy + 4:.1f}", class_="value")
        parts.append(tag("g", circle, number, class_="better" if row["pareto"] else "undecided"))
    picture = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", width=WIDTH, height=HEIGHT)
    return tag("div", picture, class_="scroll", tabindex=0)
