"""A series of numbers as a line of block characters."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values, the newest on the right; the lowest block is 0, the highest their maximum. What is
    above 0 is above the lowest block."""
    shown = values[-width:] if width > 0 else ()
    top = max(shown, default=0.0)
    if top <= 0.0:
        return BLOCKS[0] * len(shown)
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[0 if value <= 0.0 else max(1, round(steps * value / top))] for value in shown)


def bar(parts: Sequence[tuple[str, float]], width: int, rest: str = "·") -> str:
    """``width`` cells: each part's character for its share of 1, then ``rest``. A share above 0 has a cell at least,
    as long as there is one."""
    cells = ""
    for character, share in parts:
        count = max(1, round(share * width)) if share > 0.0 else 0
        cells += character * min(count, width - len(cells))
    return cells + rest * (width - len(cells))
