"""One run of the load against one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import aiohttp

from engine_lab.bench.client import background, no_garbage_collection, read_text
from engine_lab.bench.load import Limit, LoopLag, closed_loop, open_loop
from engine_lab.bench.probe import calibrate
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.replay import play, schedule_of
from engine_lab.bench.target import HttpSender, Target
from engine_lab.bench.workload import BenchRequest, Workload, arrivals, random_text
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
        self._text = read_text(load.text_file) if load.text_file else random_text(load.seed)

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

    def _workload(self, chars_per_token: float, seed: int) -> Workload:
        load = self._load
        return Workload(
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            shared_prefix=load.shared_prefix,
            chars_per_token=chars_per_token,
            nonce=NONCE,
            seed=seed,
            text=self._text,
            vocab_size=load.prompt_ids,
        )

    async def send(
        self, url: str, model: str, chars_per_token: float, number: int, scale: float = 1.0
    ) -> tuple[list[RequestRecord], list[float]]:
        """The requests of a pass, after the warm-up: their records, and how late the client's event loop woke, in
        seconds. Nothing of other passes is in the prefix cache for them. ``scale``: so many times as much load."""
        seed = self._load.seed + number
        workload = self._workload(chars_per_token, seed)
        sender = HttpSender(self._session, self._target(url, model, f"pass {number}"), clock)
        await self._closed(sender, workload.requests("warmup"), self._load.warmup)
        lag = LoopLag(clock)
        with no_garbage_collection():
            async with background(lag):
                records = await self._measured(sender, workload, seed, scale)
        return records, lag.lags_s

    async def _measured(self, sender: HttpSender, workload: Workload, seed: int, scale: float) -> list[RequestRecord]:
        """Of a scaled load as many times the requests, so that a run is as long; of a trace the same ones, faster."""
        load, records, count = self._load, list[RequestRecord](), ceil(self._load.requests * scale)
        if self._trace is not None:
            schedule = schedule_of(self._trace, workload, load.speed * scale)
            await play(sender, schedule, Limit(None, None), clock, records.append)
            return records
        if load.rate is None:
            return await self._closed(sender, workload.requests(), count, scale)
        times, limit = arrivals(load.rate * scale, seed), Limit(count, None)
        return await open_loop(sender, workload.requests(), times, limit, clock, lambda record: None)

    async def _closed(
        self, sender: HttpSender, requests: Iterator[BenchRequest], count: int, scale: float = 1.0
    ) -> list[RequestRecord]:
        at_once, limit = ceil(self._load.concurrency * scale), Limit(count, None)
        return await closed_loop(sender, requests, at_once, limit, clock, lambda record: None)


def trace_of(load: Load) -> list[TraceRequest] | None:
    """The requests of ``--trace``, at the moments that are asked for; ``None``: none are. Raises ``ValueError``."""
    if load.trace is None:
        return None
    return timed_trace(Path(load.trace), "auto", load.requests, load.rate, load.seed)
