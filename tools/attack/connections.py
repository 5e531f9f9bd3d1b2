"""Clients that hold connections: idle ones, ones that pipeline and hang up, slow readers, slow senders.

(a) More idle keep-alive connections than the server may open files: a new client is still served, the log stays short.
(b) 40 connections pipeline 50 requests each and hang up: nothing of them stays, another client gets its first token
within 1 s. (c) 1,000 streams that are read at 1 byte/s, and 5,000 idle connections: another client's median ITL grows
by at most 5 %, and every file is closed again within 5 s of their end. (d) 200 connections send their header, and 200
their body, at 1 byte/s: the former are closed after 10 s, the latter answered 408 after 30 s, another client is served.

    python -m tools.attack.connections --idle 5000 --slow 1000
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time

from tools.attack.client import CHAT, COMPLETIONS, Connection, ask, request
from tools.attack.harness import QUESTION, Row, Target, arguments, fds, limit, run, serve, target_of
from tools.attack.holder import Holder

FILES = 256
LOG_LINES = 20
TTFT_S = 1.0
ITL_CHANGE = 0.05
CLOSED_S = 5.0
BUSY_S = 300.0
"""How long the engine may take for what the slow readers asked for."""
HEADER_S, BODY_S, SLACK_S = 10.0, 30.0, 3.0
HEALTH = request("/health")
STREAM = QUESTION | {"stream": True, "temperature": 0, "ignore_eos": True}
SLOW = request(CHAT, STREAM | {"max_tokens": 64, "logprobs": True, "top_logprobs": 20})
"""The answer has some 200 KB: more than the buffers of a connection that is not read."""


async def few_files(target: Target, count: int) -> list[Row]:
    """(a) ``target`` may open fewer than ``count`` files."""
    lines = target.log_lines()
    with Holder(target, HEALTH, count):
        served = await target.same()
    more = target.log_lines() - lines
    tried = f"{count} idle connections, {FILES} open files"
    return [
        Row("idle: a new client", tried, "served" if served else "not served", "served", served),
        Row("idle: log", tried, f"{more} lines", f"<= {LOG_LINES}", more <= LOG_LINES),
    ]


async def pipelined(target: Target, connections: int, each: int) -> list[Row]:
    """(b)"""
    data = request(CHAT, STREAM | {"max_tokens": 200}) * each
    opened = [await Connection.open(target) for _ in range(connections)]
    for connection in opened:
        connection.writer.write(data)
    await opened[0].head()
    for connection in opened:
        connection.close()
    other = await ask(target, CHAT, STREAM | {"max_tokens": 8})
    first = other.at_s[0] if other.at_s else float("inf")
    held, tried = await target.held(), f"{connections} connections x {each} requests, hung up"
    shown = f"{other.ending}, TTFT {first:.2f} s"
    return [
        Row("pipelining: another client", tried, shown, f"<= {TTFT_S:.0f} s", first <= TTFT_S, measured=True),
        Row("pipelining: its answer", tried, other.ending, "whole", other.ending == "whole"),
        Row("pipelining: blocks", tried, held or "all free", "all free", not held),
    ]


async def crowd(target: Target, idle: int, slow: int) -> list[Row]:
    """(c)"""
    before, files = await median_itl(target), fds(target.api_pid)
    with Holder(target, SLOW, slow, slowly=True):
        held = await target.held(BUSY_S)  # the engine is done with all of them; they read on
        with Holder(target, HEALTH, idle):
            most = await until_open(target, files + idle)
            during = await median_itl(target)
    took, left = await until_closed(target, files)
    after = await median_itl(target)
    change = during / statistics.mean((before, after)) - 1
    itl = f"{before * 1e3:.2f} ms before, {during * 1e3:.2f} ms beside them, {after * 1e3:.2f} ms after: {change:+.0%}"
    tried = f"{slow} slow readers, {idle} idle; {most - files} files more"
    in_time = not left and took <= CLOSED_S
    return [
        Row("crowd: median ITL", tried, itl, f"<= +{ITL_CHANGE:.0%}", change <= ITL_CHANGE, measured=True),
        Row("crowd: rows and blocks", tried, held or "all free", "all free", not held),
        Row("crowd: files", tried, f"{left} open after {took:.1f} s", f"0 after {CLOSED_S:.0f} s", in_time),
    ]


async def until_open(target: Target, files: int) -> int:
    """How many files are open once the server has accepted what it can."""
    begun = time.monotonic()
    while (now := fds(target.api_pid)) < files and time.monotonic() - begun < CLOSED_S:
        await asyncio.sleep(0.05)
    return now


async def until_closed(target: Target, files: int) -> tuple[float, int]:
    """Seconds until so many files are open again, and how many more there are in the end."""
    ended = time.monotonic()
    while (left := fds(target.api_pid) - files) > 0 and time.monotonic() - ended < 4 * CLOSED_S:
        await asyncio.sleep(0.05)
    return time.monotonic() - ended, max(0, left)


async def median_itl(target: Target) -> float:
    """Seconds, over five answers of 128 tokens."""
    gaps: list[float] = []
    for _ in range(5):
        answer = await ask(target, CHAT, STREAM | {"max_tokens": 128})
        gaps += [later - sooner for sooner, later in zip(answer.at_s, answer.at_s[1:])]
    return statistics.median(gaps)


async def slow_senders(target: Target, count: int) -> list[Row]:
    """(d)"""
    body = request(COMPLETIONS, b"", length=1000)
    dripping = [drip(target, b"", HEALTH[:-2]) for _ in range(count)]
    dripping += [drip(target, body, b" " * 1000) for _ in range(count)]
    waiting = [asyncio.create_task(one) for one in dripping]
    slowest, same = 0.0, True
    while not all(task.done() for task in waiting):
        begun = time.monotonic()
        same = await target.same() and same
        slowest = max(slowest, time.monotonic() - begun)
        await asyncio.sleep(1.0)
    ends = [task.result() for task in waiting]
    headers, bodies = [end[1] for end in ends[:count]], [end[1] for end in ends[count:]]
    statuses = {end[0] for end in ends[count:]}
    tried = f"{count} connections, 1 byte/s"
    shown = f"{', '.join(map(str, sorted(statuses)))} after at most {max(bodies):.1f} s"
    in_time = max(headers) <= HEADER_S + SLACK_S, max(bodies) <= BODY_S + SLACK_S and statuses == {408}
    return [
        Row("slow headers", tried, f"closed after at most {max(headers):.1f} s", f"{HEADER_S:.0f} s", in_time[0]),
        Row("slow bodies", tried, shown, f"408 after {BODY_S:.0f} s", in_time[1]),
        Row("slow senders: canary", tried, f"same: {same}; at most {slowest:.2f} s", "the same", same),
    ]


async def drip(target: Target, at_once: bytes, slowly: bytes) -> tuple[int, float]:
    """The status (0: closed without an answer), and the seconds until then."""
    connection = await Connection.open(target)
    begun, answer = time.monotonic(), asyncio.create_task(connection.head())
    connection.writer.write(at_once)
    for byte in slowly:
        connection.writer.write(bytes([byte]))
        if (await asyncio.wait({answer}, timeout=1.0))[0] or time.monotonic() - begun > BODY_S + 4 * SLACK_S:
            break
    took = time.monotonic() - begun
    answer.cancel()
    (head,) = await asyncio.gather(answer, return_exceptions=True)
    connection.close()
    return 0 if isinstance(head, BaseException) else head.status, took


async def main(options: argparse.Namespace) -> list[Row]:
    rows = []
    if not options.url:
        async with serve(*options.overrides, before=limit(resource.RLIMIT_NOFILE, FILES)) as target:
            rows += await few_files(target, 2 * FILES)
    queue = max(256, 2 * options.slow)
    async with target_of(options, f"server.max_queue={queue}") as target:
        rows += await pipelined(target, 40, 50)
        rows += await crowd(target, options.idle, options.slow)
        rows += await slow_senders(target, options.senders)
    return rows


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, idle=5000, slow=1000, senders=200).parse_args(), main))
