"""Kills the engine (SIGKILL) while it is idle, prefills, decodes or starts, with requests in flight.

A fresh server takes two kills (three crashes within a minute end it, on purpose). Bar: no answer looks complete that is
not, ``/ready`` is 503 within 1 s and until the engine is back, the canary is then answered as before, the listener and
the API process stay.

    python -m tools.attack.kill --count 60
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tools.attack.client import COMPLETIONS, Answer, ask
from tools.attack.harness import Row, Target, arguments, engines_of, percentile, run, serve, token_ids

FLIGHTS = 8
PER_SERVER = 2
MOMENTS = ("idle", "prefill", "decode")
EXPECTED = {"whole 200", "error 200", "broken 200", "broken 0", "refused 503"}
"""A stream or an answer is whole, says that it is not, or breaks off."""
NOTICED_S = 1.0
START_S = 1.5
"""The engine is killed at a random time after its start began, at most so late."""


@dataclass(slots=True)
class Seen:
    kills: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    noticed_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    early: int = 0
    """``/ready`` was 200 before another engine was there."""
    changed: int = 0


async def attack(target: Target, rng: random.Random, seen: Seen, kills: int) -> None:
    """At most two kills; the second one may hit the engine while it starts."""
    again = kills > 1 and rng.random() < 0.25
    if await kill(target, rng.choice(MOMENTS), rng, seen, again) < kills:
        await kill(target, rng.choice(MOMENTS), rng, seen)


async def kill(target: Target, moment: str, rng: random.Random, seen: Seen, again: bool = False) -> int:
    """Returns how many kills it took. ``again``: the engine that is started instead is killed, too."""
    before = seen.kills.total()
    (victim,) = engines_of(target.api_pid)
    flights = [asyncio.create_task(flight(target, moment, rng)) for _ in range(FLIGHTS if moment != "idle" else 0)]
    await asyncio.sleep(rng.uniform(0.3, 1.0) if moment == "decode" else rng.uniform(0.0, 0.3))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    seen.kills[moment] += 1
    await until_not_ready(target, seen, killed)
    if again:
        while victim in (engines := engines_of(target.api_pid)) or not engines:
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, START_S))
        if not await target.is_ready():
            victim = engines[0]
            os.kill(victim, signal.SIGKILL)
            seen.kills["start"] += 1
            await until_not_ready(target, seen, time.monotonic())
    await target.until_ready()
    seen.back_s.append(time.monotonic() - killed)
    seen.early += victim in engines_of(target.api_pid) or await target.engine() == victim
    seen.changed += not await target.same()
    seen.endings.update(f"{answer.ending} {answer.status}" for answer in await asyncio.gather(*flights))
    return seen.kills.total() - before


async def flight(target: Target, moment: str, rng: random.Random) -> Answer:
    """A request that runs when the engine dies: long in its prompt or in its output, streamed or not."""
    size, tokens = (2500, 100) if moment == "prefill" else (8, 1500)
    body = {"prompt": token_ids(rng, size), "max_tokens": tokens, "ignore_eos": True, "stream": rng.random() < 0.75}
    return await ask(target, COMPLETIONS, body)


async def until_not_ready(target: Target, seen: Seen, killed: float) -> None:
    while await target.is_ready() and time.monotonic() - killed < 10:
        await asyncio.sleep(0.01)
    seen.noticed_s.append(time.monotonic() - killed)


def rows(seen: Seen) -> list[Row]:
    tried = f"{seen.kills.total()} kills: " + ", ".join(f"{name} {number}" for name, number in seen.kills.items())
    endings = ", ".join(f"{name}: {number}" for name, number in sorted(seen.endings.items())) or "none"
    odd = set(seen.endings) - EXPECTED
    noticed, in_time = f"after at most {max(seen.noticed_s):.2f} s", max(seen.noticed_s) <= NOTICED_S
    back = f"back after {percentile(seen.back_s, 50):.1f} s (median), {max(seen.back_s):.1f} s (worst)"
    return [
        Row("kill: answers in flight", tried, endings, "whole, error event, broken or 503", not odd),
        Row("kill: /ready is 503", tried, noticed, f"<= {NOTICED_S:.0f} s", in_time, measured=True),
        Row("kill: /ready until it is back", tried, f"{seen.early} times 200 too early; {back}", "0", not seen.early),
        Row("kill: canary", tried, f"{seen.changed} differ", "0", not seen.changed),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    rng, seen = random.Random(options.seed), Seen()
    while (left := options.count - seen.kills.total()) > 0:
        async with serve(*options.overrides) as target:
            await attack(target, rng, seen, min(left, PER_SERVER))
    return rows(seen)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, count=60).parse_args(), main))
