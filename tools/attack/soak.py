"""Mixed traffic for minutes: unique prompts, mixed sampling parameters, a fifth of the clients gone midway.

What fills up once and is bounded (the tokenizer's cache, the KV pool) is filled first. Bar: over the last half, neither
process grows by more than 1 MB a minute (least squares); threads, files and KV blocks are at the end what they were
before; no answer but 200; the canary is answered as before. The throughput of the last tenth beside that of the first
is reported.

    python -m tools.attack.soak --minutes 30
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, Connection, ask, once, request
from tools.attack.harness import Row, Target, arguments, fds, rss_mb, run, target_of, threads, token_ids

OVERRIDES = ("memory.kv_tokens=16384",)
CLIENTS = 12
GROWTH_MB = 1.0
EVERY_S = 1.0
LARGE_TEXTS, LARGE_WORDS = 48, 30_000
"""Together more than the tokenizer remembers."""
WARM_REQUESTS = 200


@dataclass(slots=True)
class Watched:
    """Once a second: when, MB of the API process, MB of the engine, answers so far."""

    samples: list[tuple[float, float, float, int]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


async def attack(target: Target, minutes: float, seed: int) -> list[Row]:
    rng, watched = random.Random(seed), Watched()
    await fill(target, rng)
    before = await at_rest(target)
    ends = time.monotonic() + minutes * 60

    async def client(number: int) -> None:
        mine = random.Random(f"{seed}:{number}")
        while time.monotonic() < ends:
            watched.answers[await visit(target, mine)] += 1

    clients = asyncio.gather(*(client(number) for number in range(CLIENTS)))
    while not clients.done():
        sizes = rss_mb(target.api_pid), rss_mb(target.engine_pid)
        watched.samples.append((time.monotonic(), *sizes, watched.answers.total()))
        await asyncio.wait({clients}, timeout=EVERY_S)
    await clients
    return await rows(target, watched, before, await at_rest(target), minutes)


async def fill(target: Target, rng: random.Random) -> None:
    """Fill what fills up only once."""
    for _ in range(LARGE_TEXTS):
        text = " ".join(f"{rng.getrandbits(40):x}" for _ in range(LARGE_WORDS))
        await once(target, request("/tokenize", {"prompt": text}))
    for _ in range(WARM_REQUESTS // CLIENTS):
        await asyncio.gather(*(visit(target, rng) for _ in range(CLIENTS)))


async def visit(target: Target, rng: random.Random) -> str:
    """One request; a fifth of them are left before their end. Returns how it ended."""
    path, body = mixed(rng)
    if rng.random() < 0.8:
        answer = await ask(target, path, body)
        if answer.ending != "whole":
            print(f"{body} -> {answer.ending} {answer.status} {answer.code} {answer.text!r}", file=sys.stderr)
        return f"{answer.ending} {answer.status}"
    connection = await Connection.open(target)
    connection.writer.write(request(path, body))
    await asyncio.sleep(rng.expovariate(10))
    connection.reset() if rng.random() < 0.5 else connection.close()
    return "left"


def mixed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 60),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 2)),
    }
    body |= rng.choice(
        ({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"seed": rng.getrandbits(40), "top_k": 20})
    )
    body |= rng.choice(
        ({}, {"presence_penalty": 1}, {"logit_bias": {"50": -100}}, {"stop": [" the", "."]}, {"min_p": 0.1})
    )
    body |= rng.choice(({}, {"user": f"{rng.getrandbits(40):x}"}, {"cache_salt": f"{rng.getrandbits(40):x}"}))
    if rng.random() < 0.5:
        return COMPLETIONS, body | {"prompt": token_ids(rng, rng.randint(1, 400)), "logprobs": rng.choice((None, 3))}
    words = " ".join(f"{rng.getrandbits(20):x}" for _ in range(rng.randint(1, 80)))
    return CHAT, body | {"messages": [{"role": "user", "content": words}], "logprobs": rng.choice((None, True))}


async def at_rest(target: Target) -> dict[str, object]:
    """What should be the same whenever nothing runs."""
    held = await target.held()
    await asyncio.sleep(1.0)  # closed connections are noticed
    counts = {"files": fds(target.api_pid), "engine files": fds(target.engine_pid)}
    return counts | {"threads": threads(target.api_pid), "engine threads": threads(target.engine_pid), "held": held}


async def rows(
    target: Target, watched: Watched, before: dict[str, object], after: dict[str, object], minutes: float
) -> list[Row]:
    half = watched.samples[len(watched.samples) // 2 :]
    api, engine = slope([(at, mb) for at, mb, _, _ in half]), slope([(at, mb) for at, _, mb, _ in half])
    tried = f"{minutes:g} minutes, {watched.answers.total()} requests"
    endings = ", ".join(f"{name}: {number}" for name, number in sorted(watched.answers.items()))
    changed = ", ".join(f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])
    same = await target.same() and await target.engine() == target.engine_pid
    first, last = rate(watched, 0.0), rate(watched, 0.9)
    pace, bar = f"{last:.1f} requests/s at the end, {first:.1f} at the start", f"<= {GROWTH_MB:.0f} MB/min"
    return [
        Row("soak: API process", tried, f"{api:+.2f} MB/min", bar, api <= GROWTH_MB, measured=True),
        Row("soak: engine", tried, f"{engine:+.2f} MB/min", bar, engine <= GROWTH_MB, measured=True),
        Row("soak: at rest", tried, changed or "as before", "as before", not changed and not after["held"]),
        Row("soak: answers", tried, endings, "whole 200", set(watched.answers) <= {"whole 200", "left"}),
        Row("soak: throughput", tried, pace, "reported", None),
        Row("soak: canary", tried, "the same" if same else "differs", "the same", same),
    ]


def slope(points: list[tuple[float, float]]) -> float:
    """MB a minute, least squares over (seconds, MB)."""
    mean_s, mean_mb = (sum(values) / len(points) for values in zip(*points))
    spread = sum((at - mean_s) ** 2 for at, _ in points)
    return 60 * sum((at - mean_s) * (mb - mean_mb) for at, mb in points) / spread if spread else 0.0


def rate(watched: Watched, share: float) -> float:
    """Answers a second in the tenth that begins at this share of the time."""
    count = len(watched.samples)
    part = watched.samples[int(share * count) : int((share + 0.1) * count) + 1]
    return (part[-1][3] - part[0][3]) / max(part[-1][0] - part[0][0], EVERY_S)


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options, *OVERRIDES) as target:
        return await attack(target, options.minutes, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, minutes=10.0).parse_args(), main))
