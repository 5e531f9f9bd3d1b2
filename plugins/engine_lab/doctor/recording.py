"""Watches a running engine for some windows, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.contracts.findings import EngineReader
from engine.counters import declared
from engine_lab.doctor.classes import Recorded, long_from
from engine_lab.doctor.evidence import Evidence, Figures, engine_of
from engine_lab.doctor.figures import Look, Seen, Series, column, figures_of, look_of, series_of
from engine_lab.shared.live import LiveError, machine_between, metrics_of, plan_of

WINDOWS = 3
LOOKS = 25
"""At the queue, in a window."""
MOST_REQUESTS, MOST_DETAILS = 1000, 24
ENOUGH = 8
"""Requests that a window should see the end of."""
LONGEST_S = 60.0
"""A window is not extended beyond, nor where nobody is served."""
Probe = Callable[[], Awaitable["Probed"]]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a request met on its way that a client's takes."""

    figures: Figures = field(default_factory=dict)
    request_id: str = ""
    """It is not one of the engine's load."""


async def nothing() -> Probed:
    return Probed()


async def record(
    engine: EngineReader,
    window_s: float,
    say: Callable[[str], None] = lambda text: None,
    probe: Probe = nothing,
    longest_s: float = LONGEST_S,
) -> Evidence:
    """Takes :data:`WINDOWS` times ``window_s``, and longer where few requests end, up to ``longest_s`` each. Raises
    ``ValueError``."""
    plan = await plan_of(engine)
    try:
        facts = engine_of(plan)
    except (KeyError, TypeError, IndexError) as error:
        raise LiveError(f"/engine/plan lacks {error}: expected an engine of this version") from error
    windows: list[Figures] = []
    requests: list[Recorded] = []
    before = began = await reading(engine)
    for number in range(WINDOWS):
        say(f"window {number + 1} of {WINDOWS}")
        work = _enough(engine, before.series, window_s, longest_s, say)
        watched = await watch(engine, before, work, window_s / LOOKS, probe)
        before = watched.after
        windows.append(watched.figures)
        requests += watched.requests_since(began.at_s)
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Evidence(facts, windows, taken=taken, requests=sorted(requests, key=lambda each: each.at_s))


async def _enough(
    engine: EngineReader, before: Series, window_s: float, longest_s: float, say: Callable[[str], None]
) -> None:
    """Until :data:`ENOUGH` requests have ended: a slow engine needs longer windows."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(window_s)
        ended = _ended(series_of(await metrics_of(engine))) - _ended(before)
        stats = await engine.json("/engine/stats") or {}
        running = stats.get("running", 0) + stats.get("waiting", 0)
        seconds = time.monotonic() - began_s
        if ended >= ENOUGH or not (ended or running) or seconds + window_s > longest_s:
            return
        say(f"{ended:g} requests have ended in {seconds:.0f} s, {running} run or wait: a longer window")


def _ended(series: Series) -> float:
    return sum(series.get((declared.REQUESTS.name, reason), 0.0) for reason in ("stop", "length"))


@dataclass(frozen=True, slots=True)
class Reading:
    """Of an engine's counters."""

    at_s: float
    series: Series


@dataclass(frozen=True, slots=True)
class Window:
    """A window."""

    figures: Figures
    after: Reading
    requests: Sequence[dict[str, Any]]
    """Of ``/engine/requests``, those that ended in it."""

    def requests_since(self, began_s: float) -> list[Recorded]:
        """Those that were answered, in times since a moment."""
        ended = [each for each in self.requests if each["finish_reason"] in ("stop", "length")]
        return [recorded(each, self.after.at_s - began_s) for each in ended]


def recorded(each: dict[str, Any], asked_s: float) -> Recorded:
    """``asked_s``: when it was asked for."""
    return Recorded(
        round(asked_s - each["ended_s_ago"] - each["total_ms"] / 1e3, 3),
        each["prompt_tokens"],
        each["cached_tokens"],
        each["output_tokens"],
        each["max_tokens"],
        each["stream"] is not False,
        each["ttft_ms"],
        each["tpot_ms"],
        each["total_ms"],
        each["class"],
        each["temperature"] or 0.0,
    )


async def reading(engine: EngineReader) -> Reading:
    """Raises ``ValueError``."""
    return Reading(time.monotonic(), series_of(await metrics_of(engine)))


async def watch(
    engine: EngineReader, before: Reading, work: Awaitable[object], look_s: float, probe: Probe = nothing
) -> Window:
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
    probed = await probe()
    after = await reading(engine)
    seconds = after.at_s - before.at_s
    listed = (await engine.json(f"/engine/requests?count={MOST_REQUESTS}"))["requests"]
    load = (each for each in listed if not probed.request_id or not each["request_id"].startswith(probed.request_id))
    requests = [each for each in load if each["ended_s_ago"] <= seconds]
    details = []
    for each in sampled(requests):
        with contextlib.suppress(ValueError):  # no longer kept
            details += (await engine.json(f"/engine/requests/{each['request_id']}"))["sequences"]
    machine = machine_between(first, last)
    seen = Seen(seconds, before.series, after.series, looks, requests, details, cost, machine, probed.figures)
    return Window(figures_of(seen), after, requests)


def sampled(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of them, from beginning to end; half of them with long prompts, where there are such."""
    limit = long_from(column(requests, "prompt_tokens")) if requests else 0.0
    long = [each for each in requests if each["prompt_tokens"] >= limit]
    short = [each for each in requests if each["prompt_tokens"] < limit]
    most = MOST_DETAILS // 2 if long and short else MOST_DETAILS
    return [each for some in (long, short) for each in some[:: max(1, len(some) // most)][:most]]
