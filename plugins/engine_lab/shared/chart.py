"""Charts of points over two linear axes that begin at 0, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine_lab.shared.markup import Markup, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 270, 60, 12, 34, 40
MOST_POINTS = 3000
COLORS = 4
"""Further series begin with the first colour again."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    is_line: bool = True
    """Otherwise dots."""


def chart(
    title: str,
    x_label: str,
    series: Sequence[Series],
    x_mark: tuple[float, str] | None = None,
    y_mark: tuple[float, str] | None = None,
) -> Markup:
    """``x_mark`` and ``y_mark``: a line across, and what it says. Of many points, evenly chosen ones are drawn."""
    points = [point for one in series for point in one.points]
    x_high = max([*(x for x, _ in points), *([x_mark[0]] if x_mark else [])], default=1.0) or 1.0
    y_high = max([*(y for _, y in points), *([y_mark[0]] if y_mark else [])], default=1.0) or 1.0
    x_ticks, y_ticks = ticks(x_high), ticks(y_high)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x_end, y_end = max(x_high, x_ticks[-1]), max(y_high, y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * x / x_end, TOP + high * (1 - y / y_end)

    parts = [_text(LEFT, 16, title, "name")]
    for tick in x_ticks:
        x, y = place(tick, 0.0)
        parts += [_line(x, y, x, y + 4, "axis"), _text(x, y + 16, shown(tick), "tick")]
    for tick in y_ticks:
        x, y = place(0.0, tick)
        parts += [_line(x, y, x + wide, y, "axis"), _text(x - 6, y + 4, shown(tick), "value end")]
    parts.append(_text(LEFT + wide / 2, HEIGHT - 6, x_label, "tick"))
    if x_mark:
        x, _ = place(x_mark[0], 0.0)
        parts += [_line(x, TOP, x, TOP + high, "zero"), _text(x - 4, TOP + 12, x_mark[1], "value end")]
    if y_mark:
        _, y = place(0.0, y_mark[0])
        parts += [_line(LEFT, y, LEFT + wide, y, "floor"), _text(LEFT + 4, y - 4, y_mark[1], "value")]
    for index, one in enumerate(series):
        parts.append(_series(one, [place(x, y) for x, y in one.points], index % COLORS))
    if len(series) > 1:
        apart = min(90, 360 // len(series))
        parts += [
            tag(
                "text", one.name, x=WIDTH - RIGHT - 6 - apart * (len(series) - 1 - i), y=16, class_=f"key s{i % COLORS}"
            )
            for i, one in enumerate(series)
        ]
    picture = tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", width=WIDTH)
    return tag("div", picture, class_="chart")


def _series(one: Series, places: Sequence[tuple[float, float]], color: int) -> Markup:
    every = math.ceil(len(places) / MOST_POINTS) or 1
    dots = [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3 if one.is_line else 2) for x, y in places[::every]]
    if one.is_line and places:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places[::every])
        dots = [tag("path", d=path, class_="line"), *(dots if len(places) <= 50 else ())]
    return tag("g", *dots, class_=f"s{color}")


def ticks(high: float) -> list[float]:
    """From 0 to about ``high``, four to eight of them, at round values."""
    step = 10.0 ** math.floor(math.log10(high))
    for part in (0.2, 0.25, 0.5, 1.0, 2.0):
        if high / (step * part) <= 6:
            step *= part
            break
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _text(x: float, y: float, text: str, class_: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)
