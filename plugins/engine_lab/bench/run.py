"""What a run is made of, in every command that makes some: prompts, the warm-up, and the watch on the client itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from engine_lab.bench.load import Limit, LoopLag, closed_loop
from engine_lab.bench.load_options import LoadOptions
from engine_lab.bench.probe import ProbeError
from engine_lab.bench.stream import Clock
from engine_lab.bench.target import Send
from engine_lab.bench.workload import BenchRequest, Workload, random_text


def text_of(options: LoadOptions) -> str:
    """What prompts are cut from. Raises ``ValueError`` if there is no text in the file that is named."""
    path = options.text_file
    if not path:
        return random_text(options.seed)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: expected a file of UTF-8 text ({error})") from error
    if not text.strip():
        raise ValueError(f"--text {path}: expected some text, found none")
    return text


def workload_of(
    options: LoadOptions, text: str, chars_per_token: float, nonce: str, seed: int, **further: Any
) -> Workload:
    """``further``: fields of a :class:`Workload` that not all commands have flags for."""
    return Workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        shared_prefix=options.shared_prefix,
        chars_per_token=chars_per_token,
        nonce=nonce,
        seed=seed,
        text=text,
        vocab_size=options.prompt_ids,
        **further,
    )


async def warm_up(send: Send, requests: Iterator[BenchRequest], count: int, concurrency: int, clock: Clock) -> None:
    """Raises ``ProbeError`` if no request succeeds: a server that refuses everything, because it is not ready, does so
    faster than any client can ask."""
    if not count:
        return
    limit = Limit(count, None)
    records = await closed_loop(send, requests, min(count, concurrency), limit, clock, lambda record: None)
    if not any(record.ok for record in records):
        raise ProbeError(f"no warm-up request succeeded: {records[0].error}: {records[0].detail}")


@contextlib.asynccontextmanager
async def watched(clock: Clock) -> AsyncIterator[LoopLag]:
    """Sample the event loop's lag meanwhile, without garbage collection, which would stop the client for milliseconds
    and look like latency."""
    lag = LoopLag(clock)
    with no_garbage_collection():
        task = asyncio.create_task(lag.run())
        try:
            yield lag
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
