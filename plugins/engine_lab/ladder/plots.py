"""The plots of the report, as SVG: ratios with their intervals, and the figures from rung to rung."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_lab.ladder.analysis import BETTER, WORSE
from engine_lab.ladder.figures import FIGURES, Figure
from engine_lab.ladder.wording import interval
from engine_lab.shared.markup import Markup, joined, tag

NAMES_WIDTH, PANEL_WIDTH, GAP, ROW_HEIGHT, TOP, BOTTOM = 190, 170, 18, 24, 30, 24
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
CLASSES = {BETTER: "better", WORSE: "worse"}


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to places on a panel, by their logarithm or linearly."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """From 0 to ``PANEL_WIDTH``; what lies beyond an end is drawn there."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return PANEL_WIDTH * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low, 0.0, self.high]
        inside = [tick for tick in TICKS if self.low <= tick <= self.high]
        return inside if len(inside) <= 4 else [tick for tick in inside if round(math.log10(tick), 6).is_integer()]


def axis_of(figure: Figure, found: Sequence[dict[str, Any]]) -> Axis:
    """Wide enough for all intervals and expectations, and for the value of no change."""
    keys = ("estimate", "low", "high", "expected")
    values = [one[key] for one in found for key in keys if one[key] is not None]
    if figure.is_ratio:
        return Axis(min(0.8, *values) / 1.15, max(1.25, *values) * 1.15, True)
    most = max(0.1, *(abs(value) for value in values)) * 1.1
    return Axis(-most, most, False)


def forest(rows: Sequence[dict[str, Any]], title: str) -> Markup:
    """A panel a figure, a line a rung: estimate and interval, and what the case study expects as a diamond."""
    shown = [figure for figure in FIGURES if any(figure.key in row["figures"] for row in rows)]
    panels = [_forest_panel(figure, rows, _panel_left(i)) for i, figure in enumerate(shown)]
    return _picture(title, len(shown), len(rows), _names(rows), *panels)


def _forest_panel(figure: Figure, rows: Sequence[dict[str, Any]], left: float) -> Markup:
    found = [row["figures"].get(figure.key) for row in rows]
    axis = axis_of(figure, [one for one in found if one is not None])
    bottom = TOP + len(rows) * ROW_HEIGHT
    none = axis.place(1.0 if figure.is_ratio else 0.0)
    parts = [_line(none, TOP, none, bottom, "zero"), _text(PANEL_WIDTH / 2, TOP - 12, figure.label, "title")]
    for tick in axis.ticks():
        at = axis.place(tick)
        parts += [_line(at, bottom, at, bottom + 4, "axis"), _text(at, bottom + 16, f"{tick:.2g}", "tick")]
    parts.append(_line(0, bottom, PANEL_WIDTH, bottom, "axis"))
    parts += [_forest_row(axis, one, _row_middle(i)) for i, one in enumerate(found) if one is not None]
    return tag("g", *parts, transform=f"translate({left} 0)")


def _forest_row(axis: Axis, found: dict[str, Any], middle: float) -> Markup:
    at, parts = axis.place(found["estimate"]), []
    if found["expected"] is not None:
        x = axis.place(found["expected"])
        shape = f"M{x - 5:.1f} {middle}L{x:.1f} {middle - 5}L{x + 5:.1f} {middle}L{x:.1f} {middle + 5}Z"
        parts.append(tag("path", d=shape, class_="study"))
    if found["low"] is not None:
        parts.append(_line(axis.place(found["low"]), middle, axis.place(found["high"]), middle, "interval"))
    parts.append(tag("circle", cx=f"{at:.1f}", cy=middle, r=4))
    expected = "" if found["expected"] is None else f"; the case study expects {found['expected']:.2f}"
    label = tag("title", f"{interval(found)}: {found['verdict']}{expected}")
    return tag("g", label, *parts, class_=CLASSES.get(found["verdict"], "undecided"))


def steps(rows: Sequence[dict[str, Any]], keys: Sequence[str], title: str) -> Markup:
    """A panel a figure, a bar a rung: from the baseline upwards, and the machine's floor as a tick."""
    shown = [figure for figure in FIGURES if figure.key in keys and any(figure.key in r["figures"] for r in rows)]
    named = [{"name": "baseline"}, *rows]
    panels = [_steps_panel(figure, rows, _panel_left(i)) for i, figure in enumerate(shown)]
    return _picture(title, len(shown), len(named), _names(named), *panels)


def _steps_panel(figure: Figure, rows: Sequence[dict[str, Any]], left: float) -> Markup:
    values = chained(figure, rows)
    floors = [None, *(row["floors"].get(figure.key) for row in rows)]
    most = max(value for value in values if value is not None)
    parts = [_text(PANEL_WIDTH / 2, TOP - 12, f"{figure.label} (ms)", "title")]
    room = PANEL_WIDTH - 48
    for i, (value, floor) in enumerate(zip(values, floors)):
        middle = _row_middle(i)
        if value is None:
            parts.append(_text(4, middle + 4, "-", "value"))
            continue
        width = room * value / most
        parts.append(tag("rect", x=0, y=middle - 8, width=f"{width:.1f}", height=16, class_="bar"))
        parts.append(_text(width + 5, middle + 4, shown_ms(value), "value"))
        if floor is not None and floor < most:
            x = room * floor / most
            parts.append(_line(x, middle - 10, x, middle + 10, "floor"))
    return tag("g", *parts, transform=f"translate({left} 0)")


def chained(figure: Figure, rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """The baseline's median, and after each rung that times the ratios of all rungs up to it: medians of different
    comparisons were measured at different times. Begins anew where a rung has no ratio."""
    values: list[float | None] = [None] * (len(rows) + 1)
    for i, row in enumerate(rows):
        if (found := row["figures"].get(figure.key)) is not None:
            below = values[i]
            below = values[i] = found["before"] if below is None else below
            values[i + 1] = below * found["estimate"]
    return values


def shown_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _picture(title: str, panels: int, rows: int, *content: Markup) -> Markup:
    width, height = _panel_left(panels), TOP + rows * ROW_HEIGHT + BOTTOM
    picture = tag(
        "svg", tag("title", title), *content, viewBox=f"0 0 {width} {height}", role="img", width=width, height=height
    )
    return tag("div", picture, class_="scroll", tabindex=0)


def _names(rows: Sequence[dict[str, Any]]) -> Markup:
    return joined(*(_text(0, _row_middle(i) + 4, row["name"], "name") for i, row in enumerate(rows)))


def _panel_left(index: int) -> float:
    return NAMES_WIDTH + index * (PANEL_WIDTH + GAP)


def _row_middle(index: int) -> float:
    return TOP + (index + 0.5) * ROW_HEIGHT


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _text(x: float, y: float, text: str, class_: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)
