"""Watches a running engine for some windows, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.contracts.findings import EngineReader
from engine_lab.doctor.evidence import Evidence, Figures, engine_of
from engine_lab.doctor.figures import Look, Seen, Series, figures_of, look_of, series_of
from engine_lab.shared.live import LiveError, machine_between, metrics_of, plan_of

WINDOWS = 3
LOOKS = 25
"""At the queue, in a window."""
MOST_REQUESTS, MOST_DETAILS = 1000, 24


async def record(engine: EngineReader, window_s: float, say: Callable[[str], None] = lambda text: None) -> Evidence:
    """Takes :data:`WINDOWS` times ``window_s``. Raises ``ValueError``."""
    plan = await plan_of(engine)
    try:
        facts = engine_of(plan)
    except (KeyError, TypeError, IndexError) as error:
        raise LiveError(f"/engine/plan lacks {error}: expected an engine of this version") from error
    windows: list[Figures] = []
    before = await reading(engine)
    for number in range(WINDOWS):
        say(f"window {number + 1} of {WINDOWS}")
        figures, before = await watch(engine, before, asyncio.sleep(window_s), window_s / LOOKS)
        windows.append(figures)
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Evidence(facts, windows, taken=taken)


@dataclass(frozen=True, slots=True)
class Reading:
    """Of an engine's counters."""

    at_s: float
    series: Series


async def reading(engine: EngineReader) -> Reading:
    """Raises ``ValueError``."""
    return Reading(time.monotonic(), series_of(await metrics_of(engine)))


async def watch(
    engine: EngineReader, before: Reading, work: Awaitable[object], look_s: float
) -> tuple[Figures, Reading]:
    """Figures from ``before`` until ``work`` ends, with a look at the queue every ``look_s`` seconds meanwhile; and the
    reading at the end. Raises ``ValueError``."""
    looks: list[Look] = []
    cost = None
    first = last = await engine.json("/engine/stats") or {}
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=look_s))[0]:
            if stats := await engine.json("/engine/stats"):
                last = stats
                looks.append(look_of(stats))
                cost = stats.get("step_cost") or cost
        task.result()
    finally:
        task.cancel()
    after = await reading(engine)
    seconds = after.at_s - before.at_s
    listed = (await engine.json(f"/engine/requests?count={MOST_REQUESTS}"))["requests"]
    requests = [each for each in listed if each["ended_s_ago"] <= seconds]
    details = []
    for each in requests[:: max(1, len(requests) // MOST_DETAILS)][:MOST_DETAILS]:
        with contextlib.suppress(ValueError):  # no longer kept
            details += (await engine.json(f"/engine/requests/{each['request_id']}"))["sequences"]
    machine = machine_between(first, last)
    return figures_of(Seen(seconds, before.series, after.series, looks, requests, details, cost, machine)), after
