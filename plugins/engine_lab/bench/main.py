"""Entry of ``engine bench``: options in, a measured server out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench.busy import Watched
from engine_lab.bench.compare import read_result, render_comparison
from engine_lab.bench.load import Limit, LoopLag, OnDone, closed_loop, open_loop
from engine_lab.bench.options import BenchOptions, options_of
from engine_lab.bench.probe import Calibration, Counter, ProbeError, calibrate, find_model, load_tokenizer
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.report import Result, render, summarise
from engine_lab.bench.target import HttpSender, Send, Target, open_session
from engine_lab.bench.workload import Workload, arrivals, random_text
from engine_lab.shared.output import check_writable, write_json

INVALID = 3
"""Exit code of a run in which the client itself lagged."""
SAMPLE_CHARS = 4000
clock = time.perf_counter


def run(flags: argparse.Namespace) -> int:
    """Run ``engine bench`` with parsed flags; returns the exit status."""
    try:
        options = options_of(flags)
        if options.compare is not None:
            a, b = map(read_result, options.compare)
            Console().print(render_comparison(a, b))
            return OK
        if options.json_file is not None:
            check_writable(options.json_file)
        result = asyncio.run(measure(options))
    except ValueError as error:
        return complain(error, USAGE)
    except ProbeError as error:
        return complain(error, FAILED)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was measured", INTERRUPTED)
    Console().print(render(result))
    if options.json_file is not None:
        try:
            write_json(options.json_file, result)
        except OSError as error:
            return complain(f"--json {options.json_file}: {error.strerror or error}", FAILED)
    if not result["requests"]["ok"]:
        return FAILED
    return OK if result["valid"] else INVALID


def complain(error: object, status: int) -> int:
    print(f"engine bench: {error}", file=sys.stderr)
    return status


async def measure(options: BenchOptions) -> Result:
    """Probe the server, warm it up, run the load and sum up. Raises ``ProbeError`` or ``ValueError`` before
    any load when server or options cannot be used."""
    count_tokens = load_tokenizer(options.tokenizer) if options.tokenizer else None
    text = read_text(options.text_file) if options.text_file else random_text(options.seed)
    async with open_session(options.timeout_s) as session:
        model = options.model or await find_model(session, options.url, options.api_key)
        target = Target(
            options.url,
            model,
            options.endpoint,
            options.api_key,
            options.temperature,
            options.ignore_eos,
            options.usage_per_chunk,
        )
        if options.prompt_ids is not None:
            calibration = Calibration(1.0, "exact token ids")
        else:
            calibration = await calibrate(session, target, text[:SAMPLE_CHARS], count_tokens)
        workload = make_workload(options, text, calibration)
        async with sender(options, session, target, keep_text=count_tokens is not None) as send:
            machine = await Watched.begin(session, target)
            records, lags_s = await run_load(options, workload, send)
            watched = await machine.end()
    if count_tokens is not None:
        records = [count_output(record, count_tokens) for record in records]
    return summarise(records, lags_s, options.slo, describe_run(options, model, workload, calibration), watched)


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


def read_text(path: str) -> str:
    """Raises ``ValueError`` if there is no text in the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: expected a file of UTF-8 text ({error})") from error
    if not text.strip():
        raise ValueError(f"--text {path}: expected some text, found none")
    return text


def make_workload(options: BenchOptions, text: str, calibration: Calibration) -> Workload:
    return Workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        shared_prefix=options.shared_prefix,
        chars_per_token=calibration.chars_per_token,
        nonce=secrets.token_hex(4) if options.nonce is None else options.nonce,
        seed=options.seed,
        text=text,
        vocab_size=options.prompt_ids,
    )


async def run_load(options: BenchOptions, workload: Workload, send: Send) -> tuple[list[RequestRecord], list[float]]:
    """The measured records and the event loop's lags in seconds. Raises ``ProbeError`` if no warm-up succeeds: a server
    that refuses everything, because it is not ready, does so faster than any client can ask."""
    if options.warmup:
        warmups = await closed_loop(
            send,
            workload.requests("warmup"),
            min(options.warmup, options.concurrency),
            Limit(options.warmup, None),
            clock,
            on_done=lambda record: None,
        )
        if not any(record.ok for record in warmups):
            raise ProbeError(f"no warm-up request succeeded: {warmups[0].error}: {warmups[0].detail}")
    limit = Limit(options.requests, options.duration_s)
    requests = workload.requests()
    lag = LoopLag(clock)
    with progress_bar(options) as on_done, no_garbage_collection():
        async with background(lag):
            if options.rate is not None:
                times = arrivals(options.rate, options.seed)
                records = await open_loop(send, requests, times, limit, clock, on_done)
            else:
                records = await closed_loop(send, requests, options.concurrency, limit, clock, on_done)
    return records, lag.lags_s


@contextlib.asynccontextmanager
async def background(lag: LoopLag) -> AsyncIterator[None]:
    """Sample the event loop's lag meanwhile."""
    task = asyncio.create_task(lag.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection stops the client for milliseconds, which would look like latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def progress_bar(options: BenchOptions) -> Iterator[OnDone]:
    """A bar on standard error: requests done, and how many failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as progress:
        task = progress.add_task(options.load, total=options.requests)

        def on_done(record: RequestRecord) -> None:
            nonlocal failed
            failed += not record.ok
            text = f"{options.load}, {failed} failed" if failed else options.load
            progress.update(task, advance=1, description=text)

        yield on_done


def count_output(record: RequestRecord, count_tokens: Counter) -> RequestRecord:
    """Token count of the output by the given tokenizer, where the server did not say."""
    if record.output_tokens is not None or not record.ok:
        return record
    return replace(record, output_tokens=count_tokens(record.text))


def describe_run(options: BenchOptions, model: str, workload: Workload, calibration: Calibration) -> dict[str, Any]:
    """What was run, for the result."""
    return {
        "url": options.url,
        "grpc": options.grpc,
        "model": model,
        "load": options.load,
        "concurrency": None if options.rate is not None else options.concurrency,
        "rate": options.rate,
        "requests": options.requests,
        "duration_s": options.duration_s,
        "prompt_tokens": str(options.prompt_tokens),
        "output_tokens": str(options.output_tokens),
        "shared_prefix": options.shared_prefix,
        "text": options.text_file,
        "prompt_ids": options.prompt_ids,
        "endpoint": options.endpoint,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "usage_per_chunk": options.usage_per_chunk,
        "warmup": options.warmup,
        "seed": options.seed,
        "nonce": workload.nonce,
        "chars_per_token": calibration.chars_per_token,
        "prompt_length_from": calibration.source,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
