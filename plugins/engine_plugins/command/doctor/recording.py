"""Watches a running engine for some windows, one behind the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine_plugins.command.doctor.evidence import Evidence, Figures, engine_of
from engine_plugins.command.doctor.figures import Look, Seen, Series, figures_of, look_of, series_of
from engine_plugins.command.live import LiveEngine, LiveError

WINDOWS = 3
LOOKS = 25
"""At the queue, in a window."""
MOST_REQUESTS, MOST_DETAILS = 1000, 24


async def record(engine: LiveEngine, window_s: float, say: Callable[[str], None] = lambda text: None) -> Evidence:
    """Takes :data:`WINDOWS` times ``window_s``. Raises :class:`LiveError`."""
    plan = await engine.json("/engine/plan")
    windows: list[Figures] = []
    before = series_of(await engine.metrics())
    for number in range(WINDOWS):
        say(f"window {number + 1} of {WINDOWS}")
        figures, before = await _window(engine, window_s, before)
        windows.append(figures)
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Evidence(engine_of(plan), windows, taken=taken)


async def _window(engine: LiveEngine, window_s: float, before: Series) -> tuple[Figures, Series]:
    """Of the next ``window_s`` seconds; and the counters at its end."""
    began = time.monotonic()
    looks: list[Look] = []
    cost = None
    for number in range(1, LOOKS + 1):
        await asyncio.sleep(max(0.0, began + number * window_s / LOOKS - time.monotonic()))
        stats = await engine.json("/engine/stats")
        if stats:
            looks.append(look_of(stats))
            cost = stats.get("step_cost") or cost
    after = series_of(await engine.metrics())
    seconds = time.monotonic() - began
    listed = (await engine.json(f"/engine/requests?count={MOST_REQUESTS}"))["requests"]
    requests = [each for each in listed if each["ended_s_ago"] <= seconds]
    apart = max(1, len(requests) // MOST_DETAILS)
    details = []
    for each in requests[::apart][:MOST_DETAILS]:
        try:
            details += (await engine.json(f"/engine/requests/{each['request_id']}"))["sequences"]
        except LiveError:
            continue  # no longer kept
    return figures_of(Seen(seconds, before, after, looks, requests, details, cost)), after
