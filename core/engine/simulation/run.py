"""Requests through one or several simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.simulation.outcome import Outcome
from engine.simulation.spec import EngineSpec
from engine.simulation.trace import TraceRequest

Route = Callable[[TraceRequest, Sequence[int]], int]
"""Chooses the engine of a request, by index; it is given how many requests each engine has at the moment."""


def simulate(
    requests: Iterable[TraceRequest],
    engines: Sequence[EngineSpec],
    *,
    route: Route | None = None,
    seed: int = 0,
    leap: bool = True,
) -> Outcome:
    """Serve ``requests``, ordered by arrival, and return what became of each.

    ``route``: round robin by default. ``leap``: compute runs of equal decode steps at once; what comes out is the same.
    ``seed``: of accepted drafts.
    """
    raise NotImplementedError
