"""Non-negative least squares by coordinate descent, on weighted sums (Lawson and Hanson, 1974).

``sums``: ``[terms, terms + 1]``, of a term's products with every term, and with what is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

_MOST_SWEEPS, _SETTLED = 2000, 1e-6
"""Until no coefficient changes by more than this share."""


def solved(sums: Sequence[Sequence[float]], start: Sequence[float]) -> list[float]:
    """The coefficients, searched from ``start`` on."""
    solution = list(start)
    for _ in range(_MOST_SWEEPS):
        before = tuple(solution)
        sweep(sums, solution)
        if all(abs(now - then) <= _SETTLED * then for now, then in zip(solution, before, strict=True)):
            break
    return solution


def sweep(sums: Sequence[Sequence[float]], solution: list[float]) -> None:
    """One descent along each coordinate: one that no sample tells of stays as it is."""
    for i, row in enumerate(sums):
        if row[i] > 0.0:
            missing = row[-1] - sum(map(mul, row, solution))  # map ends with the solution
            solution[i] = max(0.0, solution[i] + missing / row[i])
