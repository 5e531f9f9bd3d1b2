"""Figures as ``tools/benchmarks/collectives.py`` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine_lab.shared.estimates.collectives import Figure
from engine_lab.shared.estimates.errors import EstimateError

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def figures(text: str, source: str) -> tuple[Figure, ...]:
    """Of every way in its tables, whose name is the method: medians. Raises :class:`EstimateError` for another text."""
    found = tuple(_figures(text.splitlines(), source))
    if not found:
        raise EstimateError(f"{source}: no table of all-reduces, expected what tools/benchmarks/collectives.py prints")
    return found


def _figures(lines: list[str], source: str) -> Iterator[Figure]:
    ranks, ways, device = 0, [], ""
    for line in lines:
        if found := re.match(r"(\d+) ranks, us\b", line):
            ranks, ways = int(found[1]), []
        elif found := re.match(r"(\d+ cores);", line):
            device = found[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") and ranks else []
        if cells and cells[0] == "bytes":
            ways = cells[1:]
        elif cells and ways and (size := re.fullmatch(r"(\d+) (B|KiB|MiB)", cells[0])):
            for way, cell in zip(ways, cells[1:], strict=True):
                if way != "one copy":
                    num_bytes = int(size[1]) * UNITS[size[2]]
                    yield Figure(way, ranks, num_bytes, float(cell.split()[0]), device, source, "measured")
