"""Stops the engine (SIGSTOP): for good, for a moment, and the API process instead.

With server.stall_s=5, a stopped engine, idle or with streams in flight. Bar: ``/ready`` is 503 within 5 s, the engine
is killed and another one started, no answer looks complete that is not, the canary is then answered as before. An
engine stopped for less than that completes every stream with the same text. While the API process is stopped for 10 s,
its engine is not killed.

    python -m tools.attack.stop --count 20
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
from typing import Any

from tools.attack.client import COMPLETIONS, Answer, ask
from tools.attack.harness import Row, Target, arguments, engines_of, percentile, run, serve, token_ids
from tools.attack.kill import EXPECTED

STALL_S = 5
OVERRIDES = (f"server.stall_s={STALL_S}",)
FLIGHTS, TOKENS = 6, 2000
PER_SERVER = 2
"""A killed engine counts as a crash, and three within a minute end the server."""
READY_S = 5.0
SHORT_S, API_S = 3.0, 10.0


@dataclass(slots=True)
class Seen:
    stops: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    noticed_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    changed: int = 0
    same_engine: int = 0
    """The stopped engine was there when the server was ready again."""


async def attack(target: Target, rng: random.Random, seen: Seen, flights: int, tokens: int = TOKENS) -> None:
    """Stop the engine for good, with so many requests for so many tokens in flight."""
    (victim,) = engines_of(target.api_pid)
    running = [asyncio.create_task(ask(target, COMPLETIONS, flight(rng, tokens))) for _ in range(flights)]
    await asyncio.sleep(rng.uniform(0.2, 0.8) if flights else rng.uniform(0.0, 1.2))
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    seen.stops["streaming" if flights else "idle"] += 1
    while await target.is_ready() and time.monotonic() - stopped < 3 * READY_S:
        await asyncio.sleep(0.02)
    seen.noticed_s.append(time.monotonic() - stopped)
    await target.until_ready()
    seen.back_s.append(time.monotonic() - stopped)
    seen.same_engine += victim in engines_of(target.api_pid)
    seen.endings.update(f"{answer.ending} {answer.status}" for answer in await asyncio.gather(*running))
    seen.changed += not await target.same()


def flight(rng: random.Random, tokens: int) -> dict[str, Any]:
    body = {"prompt": token_ids(rng, 8), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return body | {"stream": rng.random() < 0.75}


async def for_a_moment(target: Target, rng: random.Random, seconds: float = SHORT_S) -> Row:
    """The engine is stopped and goes on before anybody should mind."""
    bodies = [flight(rng, 150) for _ in range(FLIGHTS)]
    expected = [await ask(target, COMPLETIONS, body) for body in bodies]
    answers, same = await _paused(target, engines_of(target.api_pid)[0], bodies, seconds)
    wrong = sum((a.ending, a.text) != ("whole", e.text) for a, e in zip(answers, expected))
    result = f"{wrong} of {len(answers)} outputs wrong, " + ("the same engine" if same else "another engine")
    return Row(
        "stop: engine for a moment", f"{seconds:.0f} s, while streaming", result, "0, the same", same and not wrong
    )


async def api(target: Target, rng: random.Random, seconds: float = API_S) -> Row:
    """The API process is stopped; its engine is not to blame."""
    bodies = [flight(rng, 150) for _ in range(FLIGHTS)]
    answers, same = await _paused(target, target.api_pid, bodies, seconds)
    same = same and await target.same()
    wrong = sum(answer.ending != "whole" for answer in answers)
    result = f"{wrong} of {len(answers)} outputs not whole, " + ("the same engine" if same else "another engine")
    return Row("stop: API process", f"{seconds:.0f} s, while streaming", result, "0, the same", same and not wrong)


async def _paused(target: Target, pid: int, bodies: list[dict[str, Any]], seconds: float) -> tuple[list[Answer], bool]:
    """The answers, and whether the engine is the same afterwards."""
    before = engines_of(target.api_pid)
    running = [asyncio.create_task(ask(target, COMPLETIONS, body)) for body in bodies]
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return await asyncio.gather(*running), engines_of(target.api_pid) == before


def rows(seen: Seen) -> list[Row]:
    tried = f"{seen.stops.total()} stops: " + ", ".join(f"{name} {number}" for name, number in seen.stops.items())
    endings = ", ".join(f"{name}: {number}" for name, number in sorted(seen.endings.items())) or "none"
    noticed = f"after {percentile(seen.noticed_s, 50):.1f} s (median), {max(seen.noticed_s):.1f} s (worst)"
    back = f"{seen.same_engine} times the same engine; ready again after {max(seen.back_s):.1f} s (worst)"
    in_time = max(seen.noticed_s) <= READY_S
    return [
        Row("stop: /ready is 503", tried, noticed, f"<= {READY_S:.0f} s", in_time, measured=True),
        Row("stop: another engine", tried, back, "0", not seen.same_engine),
        Row("stop: answers in flight", tried, endings, "error event, broken or 503", set(seen.endings) <= EXPECTED),
        Row("stop: canary", tried, f"{seen.changed} differ", "0", not seen.changed),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    rng, seen, others = random.Random(options.seed), Seen(), []
    for i in range(0, options.count, PER_SERVER):
        async with serve(*OVERRIDES, *options.overrides) as target:
            if i == 0:
                others = [await for_a_moment(target, rng), await api(target, rng)]
            for j in range(i, min(i + PER_SERVER, options.count)):
                await attack(target, rng, seen, FLIGHTS if j % 2 else 0)
    return rows(seen) + others


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, count=20).parse_args(), main))
