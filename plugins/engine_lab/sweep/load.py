"""One run of the load against one engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from math import ceil
from pathlib import Path

import aiohttp

from engine_lab.bench.load import Limit, closed_loop, open_loop
from engine_lab.bench.mixture import flows, mixed
from engine_lab.bench.probe import calibrate
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.replay import play, schedule_of
from engine_lab.bench.run import text_of, warm_up, watched, workload_of
from engine_lab.bench.target import HttpSender, Target
from engine_lab.bench.workload import Workload, arrivals
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import timed_trace
from engine_lab.sweep.options import Load

NONCE = "sweep"
clock = time.perf_counter


class Requests:
    """Makes and sends the requests of a sweep: the same ones for every set in a pass."""

    def __init__(self, session: aiohttp.ClientSession, load: Load) -> None:
        """Raises ``ValueError`` if there is no text to cut prompts from, or no trace."""
        self._session, self._load = session, load
        self._trace = trace_of(load)
        self._text = text_of(load)

    async def chars_per_token(self, url: str, model: str) -> float:
        """Of the text that prompts are cut from. Raises ``ProbeError``."""
        if self._load.prompt_ids is not None:
            return 1.0
        target = self._target(url, model, "calibration")
        return (await calibrate(self._session, target, self._text)).chars_per_token

    def _target(self, url: str, model: str, salt: str) -> Target:
        load = self._load
        return Target(
            url, model, load.endpoint, temperature=load.temperature, ignore_eos=load.ignore_eos, cache_salt=salt
        )

    async def send(
        self, url: str, model: str, chars_per_token: float, number: int, scale: float = 1.0
    ) -> tuple[list[RequestRecord], list[float]]:
        """The requests of a pass, after the warm-up: their records, and how late the client's event loop woke, in
        seconds. Nothing of other passes is in the prefix cache for them. ``scale``: so many times as much load. Raises
        ``ProbeError`` if no request of the warm-up succeeds."""
        load, seed = self._load, self._load.seed + number
        workload = workload_of(load, self._text, chars_per_token, NONCE, seed)
        sender = HttpSender(self._session, self._target(url, model, f"pass {number}"), clock)
        first = (replace(each, turns=(), leave_after_s=None) for each in mixed(load.classes, workload, "warmup"))
        await warm_up(sender, first, load.warmup, load.concurrency, clock)
        async with watched(clock) as lag:
            records = await self._measured(sender, workload, seed, scale)
        return records, lag.lags_s

    async def _measured(self, sender: HttpSender, workload: Workload, seed: int, scale: float) -> list[RequestRecord]:
        """Of a scaled load as many times the requests, so that a run is as long; of a trace the same ones, faster."""
        load, records = self._load, list[RequestRecord]()
        if self._trace is not None:
            schedule = schedule_of(self._trace, workload, load.speed * scale)
            await play(sender, schedule, Limit(None, None), clock, records.append)
            return records
        limit = Limit(ceil(load.requests * scale), None) if load.duration_s is None else Limit(None, load.duration_s)
        async with asyncio.TaskGroup() as tasks:
            for flow in flows(load.classes, workload, "measured", load.rate, load.concurrency, seed):
                if flow.rate is None:
                    at_once = ceil(flow.concurrency * scale)
                    come = closed_loop(sender, flow.requests, at_once, limit, clock, records.append)
                else:
                    times = arrivals(flow.rate * scale, flow.seed)
                    come = open_loop(sender, flow.requests, times, limit, clock, records.append)
                tasks.create_task(come)
        return records


def check_inputs(load: Load) -> None:
    """Raises ``ValueError`` where the text or the trace of a load cannot be read."""
    text_of(load)
    trace_of(load)


def trace_of(load: Load) -> list[TraceRequest] | None:
    """The requests of ``--trace``, at the moments that are asked for; ``None``: none are. Raises ``ValueError``."""
    if load.trace is None:
        return None
    return timed_trace(Path(load.trace), "auto", load.requests, load.rate, load.seed)
