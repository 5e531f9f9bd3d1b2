"""Batches: everything is killed and the disk is full while one runs; and what clients notice of one.

(a) A batch of short lines on a small disk (a tmpfs, which needs the right to mount; else a limit on the size of files).
The server and its engine are killed at random moments, the disk is filled and emptied again. Bar: every line is in the
outputs exactly once, with the text that it has by itself. (b) Clients ask at random moments, in turns with and without
a batch. Bar: the P95 of their TTFT beside a batch is at most 1.10 times that without one.

    python -m tools.attack.batches --lines 5000 --kills 2 --seconds 20 --rounds 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, ask, get, once, request
from tools.attack.harness import Row, Target, arguments, engines_of, percentile, run, serve, token_ids

DISK_MB = 64
FULL_S = 8.0
RATES = (0.5, 2.0)
"""Requests of clients per second: lines run between most of them, and between few."""


async def upload(target: Target, data: bytes) -> str:
    """The id of the file."""
    border = "attack"
    head = f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{border}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = head.encode() + data + f"\r\n--{border}--\r\n".encode()
    lines = ["POST /v1/files HTTP/1.1", "Host: localhost", f"Content-Type: multipart/form-data; boundary={border}"]
    reply = await once(target, "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body)
    name: str = reply.json()["id"]
    return name


async def create(target: Target, data: bytes) -> str:
    """The id of a batch of these lines."""
    asked = {"input_file_id": await upload(target, data), "endpoint": CHAT, "completion_window": "24h"}
    name: str = (await once(target, request("/v1/batches", asked))).json()["id"]
    return name


async def state(target: Target, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await get(target, f"/v1/batches/{name}")).json()
    return found


def line(number: int, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": f"What does json.dumps do with {number}?"}]
    body = {"model": "bundled", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


async def killed(options: argparse.Namespace) -> Row:
    """(a)"""
    rng, total = random.Random(options.seed), options.lines
    lines = [line(number, 8) for number in range(total)]
    with disk() as (folder, how):
        overrides = [f"batches.path={folder}/b", "batches.quiet_s=0", "batches.max_in_flight=16", *options.overrides]
        name, paused, filled = "", "", False
        marks = sorted(rng.uniform(0.1, 0.8) for _ in range(options.kills))
        for mark in [*marks, None]:
            async with serve(*overrides) as target:
                name = name or await create(target, b"".join(lines))
                while not (found := await state(target, name))["completed_at"]:
                    done = found["request_counts"]["completed"] / total
                    if mark is not None and done >= mark:
                        kill(target)
                        break
                    if not filled and done > 0.05 + (marks[0] if marks else 0):
                        filled, paused = True, await fill(target, folder, name)
                    await asyncio.sleep(0.05)
                else:
                    outputs = await get(target, f"/v1/files/{found['output_file_id']}/content")
                    answers = [json.loads(each) for each in outputs.body.splitlines()]
                    wrong = await differing(target, rng.sample(answers, min(50, total)))
        counts = Counter(answer["custom_id"] for answer in answers)
        exact = counts == Counter(f"n{number}" for number in range(total)) and not found["error_file_id"]
    tried = f"{total} lines, {options.kills} times SIGKILL of server and engine, a full disk ({how})"
    result = f"{len(answers)} answers of {len(counts)} lines, {wrong} of 50 differ; while the disk was full: {paused}"
    return Row("batches: killed, disk full", tried, result, "each line once, 0 differ", exact and not wrong)


def kill(target: Target) -> None:
    assert target.process is not None
    for pid in (target.api_pid, *engines_of(target.api_pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    target.process.wait()


async def fill(target: Target, folder: Path, name: str) -> str:
    """Leave no room on the disk for a while; what the batch said meanwhile."""
    ballast = folder / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    before = (await state(target, name))["request_counts"]["completed"]
    await asyncio.sleep(FULL_S)
    found = await state(target, name)
    ballast.unlink()
    more = found["request_counts"]["completed"] - before
    return f"{found['status']}, {'paused' if found.get('paused') else 'not paused'}, {more} lines more"


async def differing(target: Target, answers: list[Any]) -> int:
    wrong = 0
    for answer in answers:
        asked = json.loads(line(int(answer["custom_id"][1:]), 8))["body"]
        by_itself = await ask(target, CHAT, asked)
        wrong += by_itself.text != answer["response"]["body"]["choices"][0]["message"]["content"]
    return wrong


@contextmanager
def disk() -> Iterator[tuple[Path, str]]:
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", name], check=True)
        try:
            yield Path(name), f"tmpfs of {DISK_MB} MB"
        finally:
            subprocess.run(["umount", "-l", name], check=True)


async def beside(options: argparse.Namespace, rate: float) -> Row:
    """(b)"""
    rng = random.Random(options.seed)
    ttft_ms: dict[bool, list[float]] = {False: [], True: []}
    answered = 0
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as folder:
        async with serve(f"batches.path={folder}/b", *options.overrides) as target:
            await load(target, rng, rate, 3.0)  # warms up
            for turn in range(2 * options.rounds):
                has_batch = turn % 2 == (turn // 2) % 2  # without, with, with, without
                if has_batch:
                    name = await create(target, b"".join(line(n, 64) for n in range(5000)))
                    while (await state(target, name))["status"] == "validating":
                        await asyncio.sleep(0.05)
                ttft_ms[has_batch] += await load(target, rng, rate, options.seconds)
                if has_batch:
                    await once(target, request(f"/v1/batches/{name}/cancel", {}))
                    while (found := await state(target, name))["status"] != "cancelled":
                        await asyncio.sleep(0.05)
                    answered += found["request_counts"]["completed"]
    without, during = (ttft_ms[has_batch] for has_batch in (False, True))
    at95, at50 = (percentile(during, q) / percentile(without, q) for q in (95, 50))
    tried = f"{rate:g} requests/s, {len(during)} beside a batch, {len(without)} without; {answered} lines meanwhile"
    result = ", ".join(f"P{q} {percentile(during, q):.1f} ms, {percentile(without, q):.1f} without" for q in (95, 50))
    result = f"TTFT: {result}; {at95:.2f} and {at50:.2f} times"
    return Row("batches: TTFT of clients", tried, result, "P95 at most 1.10 times", at95 <= 1.10, measured=True)


async def load(target: Target, rng: random.Random, rate: float, seconds: float) -> list[float]:
    """TTFT in ms of requests that come at random moments."""
    ends, flights = time.monotonic() + seconds, list[asyncio.Task[Any]]()
    while time.monotonic() < ends:
        await asyncio.sleep(rng.expovariate(rate))
        body = {"model": "bundled", "prompt": token_ids(rng, 200), "max_tokens": 16, "stream": True, "ignore_eos": True}
        flights.append(asyncio.create_task(ask(target, COMPLETIONS, body)))
    return [answer.at_s[0] * 1e3 for answer in await asyncio.gather(*flights) if answer.at_s]


async def attack(options: argparse.Namespace) -> list[Row]:
    rows = [await killed(options)] if options.lines else []
    return rows + [await beside(options, rate) for rate in RATES if options.rounds]


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, lines=5000, kills=2, seconds=20.0, rounds=6).parse_args(), attack))
