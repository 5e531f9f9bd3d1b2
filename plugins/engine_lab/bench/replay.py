"""Playing a schedule of requests: each at its moment, or so long after the answers that it waits for.

The requests of a trace have no texts. Theirs are made: of the right length, and of the same beginning as far as the
trace's block hashes are the same. Where a trace names the blocks of answers, other text stands for them in the next
prompt, as the server's answers are its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine_lab.bench.load import Limit, OnDone, Sleep
from engine_lab.bench.stream import Clock
from engine_lab.bench.target import Send
from engine_lab.bench.workload import BenchRequest, Workload, random_ids
from engine_lab.shared.simulation.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Due:
    """A request and its moment."""

    request: BenchRequest
    at_s: float
    """Since the start, or, with ``after``, since the last of those answers ended."""
    key: str = ""
    """What ``after`` of others calls it."""
    after: tuple[str, ...] = ()


def schedule_of(trace: Sequence[TraceRequest], workload: Workload, speed: float = 1.0) -> list[Due]:
    """The requests of a trace, ``speed`` times as fast: arrivals and delays after answers are divided by it. Raises
    ``ValueError`` where one waits for a request that is not in the trace."""
    known = {request.request_id for request in trace}
    for request in trace:
        if missing := [name for name in request.after if name not in known]:
            raise ValueError(f"request {request.request_id!r} waits for {missing[0]!r}, which is not in the trace")
    return [
        Due(prompt_of(index, request, workload), request.arrival_s / speed, request.request_id, request.after)
        for index, request in enumerate(trace)
    ]


def prompt_of(index: int, request: TraceRequest, workload: Workload) -> BenchRequest:
    """A request of the trace's lengths. Each named block has its own text or token ids; the rest is this request's."""
    blocks = request.block_hashes[: -(-request.prompt_tokens // request.block_tokens)] if request.block_tokens else ()
    named = min(request.prompt_tokens, len(blocks) * request.block_tokens)
    rng = random.Random(f"{workload.seed}/{workload.nonce}/{index}")
    parts = [random.Random(f"{workload.seed}/{workload.nonce}/block {name}") for name in blocks]
    if workload.vocab_size is not None:
        ids = [i for part in parts for i in random_ids(part, request.block_tokens, workload.vocab_size)][:named]
        ids += random_ids(rng, request.prompt_tokens - named, workload.vocab_size)
        return BenchRequest(index, tuple(ids), request.output_tokens, request.service_class)
    size = request.block_tokens * workload.chars_per_token
    text = "".join(workload.words(part, round(size)) for part in parts)[: round(named * workload.chars_per_token)]
    chars = max(1, round(request.prompt_tokens * workload.chars_per_token))
    if len(text) < chars:
        text = (text + f"{workload.nonce} {index}: " + workload.passage(rng, chars))[:chars]
    return BenchRequest(index, text, request.output_tokens, request.service_class)


async def play(
    send: Send,
    schedule: Sequence[Due],
    limit: Limit,
    clock: Clock,
    on_done: OnDone,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Send every request of a schedule when it is due, however many are running, and wait for all. ``on_done`` gets the
    records as they end. A request that waits for others waits for their ends, whether they failed or not."""
    start, started = clock(), 0
    missing = [set(due.after) for due in schedule]
    ready_s = [start] * len(schedule)
    waiting: dict[str, list[int]] = {}
    for which, due in enumerate(schedule):
        for name in set(due.after):
            waiting.setdefault(name, []).append(which)
    async with asyncio.TaskGroup() as tasks:

        async def one(which: int, due_s: float) -> None:
            due = schedule[which]
            record = await send(due.request, due_s)
            on_done(record)
            for other in waiting.pop(due.key, ()) if due.key else ():
                missing[other].discard(due.key)
                ready_s[other] = max(ready_s[other], record.done_s)
                if not missing[other]:
                    tasks.create_task(later(other, ready_s[other] + schedule[other].at_s))

        async def later(which: int, due_s: float) -> None:
            nonlocal started
            if limit.allows(started, due_s - start):
                started += 1
                await sleep(max(0.0, due_s - clock()))
                await one(which, due_s)

        for which in sorted((i for i, due in enumerate(schedule) if not due.after), key=lambda i: schedule[i].at_s):
            at_s = schedule[which].at_s
            if not limit.allows(started, at_s):
                break
            started += 1
            await sleep(max(0.0, start + at_s - clock()))
            tasks.create_task(one(which, start + at_s))
