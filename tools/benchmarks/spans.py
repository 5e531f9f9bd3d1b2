"""Do the spans of requests add up, under load? Against a running server:

    engine serve 'exporter=[prometheus]' &
    python -m tools.benchmarks.spans http://127.0.0.1:8000 [--requests 1000] [--at-once 12] [--model bundled]

Sends prompts of 8 to 1,500 random tokens, of which 1 to 48 more are made, 60 % of them as streams. Prints how far the
spans of ``/engine/requests`` are from the server's own total, and from the time that this client measured, as shares;
and what the mean request spent its time on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

PROMPTS, OUTPUTS, STREAMED = (8, 40, 200, 600, 1500), (1, 4, 16, 48), 0.6
TOKEN_IDS = range(300, 4000)
MOST_KEPT = 1024
"""Requests that a server keeps."""


async def send(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[str, float]:
    """The id of the response, and how long it took in ms."""
    begun_s, name = time.monotonic(), ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        if not body["stream"]:
            name = json.loads(await response.read())["id"]
        async for line in response.content:
            if not name and line.startswith(b"data: {"):
                name = json.loads(line.removeprefix(b"data: "))["id"]
    return name, (time.monotonic() - begun_s) * 1e3


def bodies(model: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {
            "model": model,
            "prompt": rng.choices(TOKEN_IDS, k=rng.choice(PROMPTS)),
            "max_tokens": rng.choice(OUTPUTS),
            "stream": rng.random() < STREAMED,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


async def measure(url: str, model: str, count: int, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: Mapping[str, Any]) -> tuple[str, float]:
            async with gate:
                return await send(session, url, body)

        sent = await asyncio.gather(*map(one, bodies(model, count)))
        async with session.get(f"{url}/engine/requests?count={count}") as response:
            response.raise_for_status()
            listed = (await response.json())["requests"]
    ended = Counter(request["finish_reason"] for request in listed)
    if ended != {"length": count}:  # a stream that fails has sent status 200 before
        raise SystemExit(f"{count} requests ended as {ended}, each expected as length")
    found = {request["request_id"].rpartition("-")[0]: request for request in listed}
    sums = [(sum(found[name]["spans"].values()), found[name]["total_ms"], wall_ms) for name, wall_ms in sent]
    show("spans beside the server's total", [abs(spans - total) / total for spans, total, _ in sums])
    show("spans beside the client's time", [abs(spans - wall) / wall for spans, _, wall in sums])
    names = dict.fromkeys(name for request in listed for name in request["spans"])
    for name in names:
        print(f"{name}: {sum(request['spans'].get(name, 0.0) for request in listed) / len(listed):.3f} ms")


def show(what: str, errors: Sequence[float]) -> None:
    ordered = sorted(errors)
    p50, p90, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99))
    within = sum(error <= 0.01 for error in ordered) / len(ordered)
    print(f"{what}: P50 {p50:.2%}, P90 {p90:.2%}, P99 {p99:.2%}; within 1 %: {within:.1%} of {len(ordered)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=1000, help=f"at most {MOST_KEPT}")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--model", default="bundled")
    flags = parser.parse_args()
    if not 0 < flags.requests <= MOST_KEPT or flags.at_once < 1:
        parser.error(f"--requests {flags.requests} --at-once {flags.at_once}: expected 1 to {MOST_KEPT}, and 1 or more")
    asyncio.run(measure(flags.url.rstrip("/"), flags.model, flags.requests, flags.at_once))


if __name__ == "__main__":
    main()
