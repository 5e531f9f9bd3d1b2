"""Up to which load sets keep the SLO."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from statistics import median
from typing import Any

from engine_lab.sweep.record import HEADROOM, Experiment, Round
from engine_lab.sweep.rounds import after
from engine_lab.tune.proof import BY

STEP = 1.25
MOST = 8.0
"""Times the load; beyond it nothing is tried."""
RUNS = 2
"""Of each set at a step."""


async def raise_load(
    experiment: Experiment, proof: dict[str, Any], make: Callable[[Round], Awaitable[None]]
) -> dict[str, float]:
    """By name of the baseline and of the chosen set, the highest load, as a multiple of the given one, at which it and
    every lower step kept the SLO, by the median of its runs; 0: not at the given one."""
    found = {name: 1.0 if kept["share"] <= 1.0 else 0.0 for name, kept in proof["kept"].items()}
    members = [one.id for one in experiment.candidates if found.get(one.name)]
    scale = STEP
    while members and scale <= MOST:
        asked = next((one for one in experiment.rounds if one.kind == HEADROOM and one.scale == scale), None)
        if asked is None:
            asked = Round(HEADROOM, members, RUNS, after(experiment.rounds[-1]), scale)
            experiment.rounds.append(asked)
        await make(asked)
        members = [one for one in asked.candidates if _share(experiment, one, asked) <= 1.0]
        found |= {experiment.candidates[one].name: scale for one in members}
        scale *= STEP
    return found


def _share(experiment: Experiment, which: int, asked: Round) -> float:
    """Infinite where a request failed."""
    runs = [experiment.runs_of(which).get(asked.first + i) for i in range(asked.passes)]
    return median([inf if run is None else run.figures[BY] or inf for run in runs])
