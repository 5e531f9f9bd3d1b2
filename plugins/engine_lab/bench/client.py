"""A server that was probed, and what is sent to it: one load after the other."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from engine_lab.bench.busy import Watched
from engine_lab.bench.load import Limit, OnDone, closed_loop, open_loop
from engine_lab.bench.mixture import flows, mixed
from engine_lab.bench.options import BenchOptions
from engine_lab.bench.pattern import POISSON
from engine_lab.bench.probe import Calibration, Counter, calibrate, find_model, load_tokenizer
from engine_lab.bench.progress import requests_done
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.replay import Due, play, schedule_of
from engine_lab.bench.result import Result, summarise
from engine_lab.bench.run import text_of, warm_up, watched, workload_of
from engine_lab.bench.target import HttpSender, Send, Target, open_session
from engine_lab.bench.workload import BenchRequest, Workload, arrivals
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import timed_trace

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Client:
    """Made by :func:`connected`."""

    options: BenchOptions
    session: aiohttp.ClientSession
    target: Target
    send: Send
    workload: Workload
    calibration: Calibration
    count_tokens: Counter | None
    trace: tuple[TraceRequest, ...] | None
    schedule: tuple[Due, ...] | None
    """Of the trace, with prompts."""

    def renamed(self, nonce: str) -> Client:
        """With another word in all prompts."""
        workload = replace(self.workload, nonce=nonce)
        schedule = None if self.trace is None else tuple(schedule_of(self.trace, workload, self.options.speed))
        return replace(self, workload=workload, schedule=schedule)

    def requests(self, stream: str) -> Iterator[BenchRequest]:
        """Endless. Streams of different names have different prompts."""
        return mixed(self.options.classes, self.workload, stream)

    async def warm_up(self) -> None:
        """Raises ``ProbeError`` if no request succeeds."""
        requests = (replace(each, turns=(), leave_after_s=None) for each in self.requests("warmup"))
        await warm_up(self.send, requests, self.options.warmup, self.options.concurrency, clock)

    async def run(self, options: BenchOptions, stream: str = "measured") -> Result:
        """One load. When it is cancelled, the result is of what had ended by then, and says so."""
        records: list[RequestRecord] = []
        interrupted = False
        machine = await Watched.begin(self.session, self.target)
        total = len(self.schedule) if self.schedule and options.requests is None else options.requests

        def on_done(record: RequestRecord) -> None:
            records.append(record)
            told(record)

        with requests_done(options.load, total) as told:
            async with watched(clock) as lag:
                try:
                    await self._load(options, stream, on_done)
                except asyncio.CancelledError:
                    interrupted = True
                    go_on()
        busy = await machine.end()
        if self.count_tokens is not None:
            records = [count_output(record, self.count_tokens) for record in records]
        return summarise(
            records,
            lag.lags_s,
            options.slo,
            self.describe(options),
            busy,
            class_slos={each.name: each.slo for each in options.classes if each.slo is not None},
            slice_s=options.slice_s,
            has_schedule=options.rate is not None or self.schedule is not None,
            interrupted=interrupted,
        )

    async def _load(self, options: BenchOptions, stream: str, on_done: OnDone) -> None:
        """That of the flags, and beside it those of classes that have one of their own."""
        if self.schedule is not None:
            await play(self.send, self.schedule, Limit(options.requests, options.duration_s), clock, on_done)
            return
        given = (options.rate, options.concurrency, options.seed)
        async with asyncio.TaskGroup() as tasks:
            for flow in flows(options.classes, self.workload, stream, *given):
                come = replace(options, rate=flow.rate, concurrency=flow.concurrency, seed=flow.seed)
                if flow.is_own:
                    come = replace(come, pattern=POISSON, most_running=None)
                tasks.create_task(self._come(come, flow.requests, on_done))

    async def _come(self, options: BenchOptions, requests: Iterator[BenchRequest], on_done: OnDone) -> None:
        """An open or a closed loop."""
        limit = Limit(options.requests, options.duration_s)
        if options.rate is not None:
            times = arrivals(options.rate, options.seed, options.pattern, options.ramp_s)
            await open_loop(self.send, requests, times, limit, clock, on_done, most_running=options.most_running)
        else:
            await closed_loop(self.send, requests, options.concurrency, limit, clock, on_done, ramp_s=options.ramp_s)

    def describe(self, options: BenchOptions) -> dict[str, Any]:
        """What was run, for the result."""
        return {
            "url": options.url,
            "grpc": options.grpc,
            "model": self.target.model,
            "load": options.load,
            "concurrency": None if options.rate is not None or options.trace is not None else options.concurrency,
            "rate": options.rate,
            "arrivals": None if options.rate is None else str(options.pattern),
            "ramp_s": options.ramp_s,
            "most_running": options.most_running,
            "trace": options.trace,
            "speed": options.speed,
            "requests": options.requests,
            "duration_s": options.duration_s,
            "prompt_tokens": str(options.prompt_tokens),
            "output_tokens": str(options.output_tokens),
            "shared_prefix": options.shared_prefix,
            "prefixes": options.prefixes,
            "turns": str(options.turns),
            "think_s": options.think_s,
            "leave": None if options.leave is None else str(options.leave),
            "classes": [each.name for each in options.classes],
            "text": options.text_file,
            "prompt_ids": options.prompt_ids,
            "endpoint": options.endpoint,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "usage_per_chunk": options.usage_per_chunk,
            "warmup": options.warmup,
            "seed": options.seed,
            "nonce": self.workload.nonce,
            "chars_per_token": self.calibration.chars_per_token,
            "prompt_length_from": self.calibration.source,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def go_on() -> None:
    """After a cancellation that was caught: the task may wait again."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


@contextlib.asynccontextmanager
async def connected(
    options: BenchOptions, nonce: str | None = None, calibration: Calibration | None = None
) -> AsyncIterator[Client]:
    """Probe the server and warm it up. ``nonce``: for all prompts, in place of a random one; ``calibration``: how long
    tokens are, where that is known. Raises ``ProbeError`` or ``ValueError`` where server or options cannot be used."""
    count_tokens = load_tokenizer(options.tokenizer) if options.tokenizer else None
    text = text_of(options)
    trace = None
    if options.trace is not None:
        read = Path(options.trace), options.trace_format, options.requests, options.rate, options.seed
        trace = tuple(timed_trace(*read))
    async with open_session(options.timeout_s) as session:
        target = Target(
            options.url,
            options.model or await find_model(session, options.url, options.api_key),
            options.endpoint,
            options.api_key,
            options.temperature,
            options.ignore_eos,
            options.usage_per_chunk,
        )
        if options.prompt_ids is not None:
            calibration = Calibration(1.0, "exact token ids")
        elif calibration is None:
            calibration = await calibrate(session, target, text, count_tokens)
        nonce = nonce or options.nonce
        workload = workload_of(
            options,
            text,
            calibration.chars_per_token,
            secrets.token_hex(4) if nonce is None else nonce,
            options.seed,
            prefixes=options.prefixes,
            turns=options.turns,
            think_s=options.think_s,
            leave=options.leave,
        )
        schedule = None if trace is None else tuple(schedule_of(trace, workload, options.speed))
        async with sender(options, session, target, keep_text=count_tokens is not None) as send:
            client = Client(options, session, target, send, workload, calibration, count_tokens, trace, schedule)
            await client.warm_up()
            yield client


@contextlib.asynccontextmanager
async def sender(
    options: BenchOptions, session: aiohttp.ClientSession, target: Target, keep_text: bool
) -> AsyncIterator[Send]:
    """Over the transport that the options name."""
    if options.grpc is None:
        yield HttpSender(session, target, clock, keep_text)
        return
    from engine_lab.bench.grpc_target import grpc_sender

    async with grpc_sender(options.grpc, target, clock, options.timeout_s) as send:
        yield send


def count_output(record: RequestRecord, count_tokens: Counter) -> RequestRecord:
    """Token count of the output by the given tokenizer, where the server did not say."""
    if record.output_tokens is not None or not record.ok:
        return record
    return replace(record, output_tokens=count_tokens(record.text))
