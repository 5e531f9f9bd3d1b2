"""A share that rises with a value: isotonic regression by pooling adjacent violators (Ayer et al., 1955)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEAST = 20
"""Observations of a step: the share of fewer says little."""


@dataclass(slots=True)
class Step:
    """From a value on, up to the next step's."""

    low: float
    hits: int
    total: int

    @property
    def share(self) -> float:
        return self.hits / self.total


def isotonic(observed: Iterable[tuple[float, bool]], least: int = LEAST) -> list[Step]:
    """Steps whose values and shares ascend, the closest to what was observed by squared error among those of at least
    ``least`` observations (all of them, where there are fewer). ``observed``: of each, the value and whether it is a
    hit. Equal values are in one step."""
    steps: list[Step] = []
    for low, hit in sorted(observed):
        if steps and (steps[-1].low == low or steps[-1].total < least):
            steps[-1].hits, steps[-1].total = steps[-1].hits + hit, steps[-1].total + 1
        else:
            steps.append(Step(low, int(hit), 1))
    pooled: list[Step] = []
    for step in steps:
        pooled.append(step)
        while len(pooled) > 1 and (pooled[-1].share <= pooled[-2].share or pooled[-1].total < least):
            last = pooled.pop()
            pooled[-1].hits, pooled[-1].total = pooled[-1].hits + last.hits, pooled[-1].total + last.total
    return pooled
