"""Two engines behind one listener: one is killed (SIGKILL) every 10 s, one is stopped (SIGSTOP), and all are restarted
one by one, while clients ask and go away.

Requests are mixed: streamed and whole, chats and completions, greedy and seeded, one to three choices, some left by
their clients. Every text is known: each engine was asked alone before. Bar: no text differs, no stream ends cleanly
before its end, no choice ends twice; no sequence fails, begun or not, unless two engines died with it; a rolling
restart loses nothing at all; loads, rows and blocks are 0 at the end, and both engines answer as before.

An engine is killed only while the other one takes requests, and at most twice in a minute: the third crash gives an
engine up, on purpose.

    python -m tools.attack.fleet --requests 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, Answer, Connection, ask, get, request
from tools.attack.harness import Row, Target, arguments, run, serve, token_ids

ENGINES = ("replica-0", "replica-1")
OVERRIDES = (f"fleet.replicas={len(ENGINES)}", "server.stall_s=5")
CLIENTS, QUESTIONS = 12, 40
KILL_S = 10.0
CRASHES, WINDOW_S = 2, 65.0
LEAVE = 0.12
"""The share of clients that do not wait for the end."""
RESTART_AT, STOP_AT = 0.3, 0.6
"""How many of the requests are answered by then."""
BY_DEATH = {"engine_dead", "engine_stalled", "engine_closed"}
READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    path: str
    body: dict[str, Any]
    outputs: dict[int, str]
    """By choice; from an engine that was asked alone."""


@dataclass(slots=True)
class Seen:
    answered: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ENGINES})
    wrong: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests that were refused, and sequences that failed without a token."""
    hits_s: list[float] = field(default_factory=list)
    """When an engine was killed or stopped; of ``time.monotonic``."""
    restarting: bool = False
    during: Counter[str] = field(default_factory=Counter)
    """Endings of requests that were sent while the rolling restart went on."""
    restart_s: float = 0.0
    differ: int = 0
    """Texts of the two engines before the load."""


async def attack(target: Target, events: Path, requests: int, seed: int, clients: int = CLIENTS) -> list[Row]:
    """``events``: what exporter ``jsonl`` of the server writes."""
    rng, seen, numbers = random.Random(seed), Seen(), iter(range(requests))
    questions = await known(target, rng, seen)

    async def client(number: int) -> None:
        mine = random.Random(f"{seed}:{number}")
        while next(numbers, None) is not None or not (seen.restart_s or chaos.done()):
            await one(target, mine.choice(questions), mine, seen)
            seen.answered += 1

    chaos = asyncio.create_task(disturb(target, rng, seen, requests))
    await asyncio.gather(*(client(number) for number in range(clients)))
    chaos.cancel()
    ended = (await asyncio.gather(chaos, return_exceptions=True))[0]
    if isinstance(ended, Exception):
        raise ended
    await all_ready(target)
    seen.lost += lost(events, seen.hits_s)
    return await rows(target, seen, questions, requests)


async def known(target: Target, rng: random.Random, seen: Seen) -> list[Question]:
    """Ask each engine alone."""
    asked = [question(rng) for _ in range(QUESTIONS)]
    by_engine = [await alone(target, name, asked) for name in ENGINES]
    seen.differ = sum(first != second for first, second in zip(*by_engine))
    return [Question(path, body, outputs) for (path, body), outputs in zip(asked, by_engine[0])]


async def alone(target: Target, engine: str, asked: list[tuple[str, dict[str, Any]]]) -> list[dict[int, str]]:
    """What one engine answers while the others are drained."""
    others = [name for name in ENGINES if name != engine]
    for name in others:
        await change(target, f"drain?engine={name}")
    answers = [await ask(target, path, body) for path, body in asked]
    for name in others:
        await change(target, f"undrain?engine={name}")
    assert all(answer.ending == "whole" for answer in answers), answers
    return [answer.outputs for answer in answers]


def question(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3)), "max_tokens": rng.randint(4, 60)}
    body |= {"temperature": 0} if rng.random() < 0.6 else {"temperature": 1, "seed": rng.randrange(1000)}
    if rng.random() < 0.5:
        words = " ".join(rng.choice(("json", "list", "file", "the", "of")) for _ in range(rng.randint(1, 60)))
        return CHAT, body | {"messages": [{"role": "user", "content": f"What does {words} do?"}]}
    return COMPLETIONS, body | {"prompt": token_ids(rng, rng.randint(1, 200)), "ignore_eos": True}


async def one(target: Target, asked: Question, rng: random.Random, seen: Seen) -> None:
    body = asked.body | {"stream": rng.random() < 0.6}
    if rng.random() < LEAVE:
        await leave(target, asked.path, body, rng)
        seen.endings["left"] += 1
        return
    during = seen.restarting
    answer = await ask(target, asked.path, body)
    streamed = "stream" if body["stream"] else "whole"
    name = f"{streamed} {answer.ending} {answer.code or answer.status}"
    seen.endings[name] += 1
    seen.during[name] += during and answer.ending != "whole"
    note(asked, answer, name, seen)


def note(asked: Question, answer: Answer, name: str, seen: Seen) -> None:
    """What is wrong with an answer."""
    said = f"{name}: {answer.outputs!r}, expected {asked.outputs!r}"
    if len(set(answer.finishes)) < len(answer.finishes):
        seen.twice.append(said)
    starts = all(asked.outputs.get(index, "").startswith(text) for index, text in answer.outputs.items())
    if not starts or (answer.ending == "whole" and answer.outputs != asked.outputs):
        seen.wrong.append(said)
    if answer.ending in ("truncated", "broken"):
        seen.truncated.append(said)
    if answer.ending in ("error", "refused") and answer.code not in BY_DEATH:
        seen.lost.append(f"{name}: {answer.text}")


def lost(events: Path, hits_s: list[float]) -> list[str]:
    """The sequences that failed, though fewer than two engines were hit meanwhile."""
    found = []
    for line in events.read_bytes().splitlines():
        event = json.loads(line)
        if event["type"] == "request" and event["finish_reason"] == "error":
            begun_s = event["at_s"] - event["e2e_ms"] / 1e3
            hits = [round(at_s - begun_s, 2) for at_s in hits_s if begun_s <= at_s <= event["at_s"]]
            if len(hits) < 2:
                found.append(
                    f"{event['request_id']} of {event['e2e_ms']:.0f} ms at {event['engine']}, hits at {hits} s"
                )
    return found


async def leave(target: Target, path: str, body: dict[str, Any], rng: random.Random) -> None:
    connection = await Connection.open(target)
    connection.writer.write(request(path, body))
    await asyncio.sleep(rng.expovariate(1 / 0.1))
    connection.reset() if rng.random() < 0.5 else connection.close()


async def disturb(target: Target, rng: random.Random, seen: Seen, requests: int) -> None:
    """Kill, restart and stop engines until cancelled."""
    restarted = stopped = False
    while True:
        await asyncio.sleep(KILL_S)
        await all_ready(target)
        share = seen.answered / requests
        if not restarted and share >= RESTART_AT:
            restarted = True
            await rolling(target, seen)
        elif not stopped and share >= STOP_AT and (name := victim(seen, rng)):
            stopped = True
            await hit(target, name, signal.SIGSTOP, seen)
        elif name := victim(seen, rng):
            await hit(target, name, signal.SIGKILL, seen)


async def rolling(target: Target, seen: Seen) -> None:
    """What happens while it goes on is counted for itself."""
    begun, seen.restarting = time.monotonic(), True
    await change(target, "restart")
    while (state := await fleet(target))["change"]["state"] == "running":
        await asyncio.sleep(0.1)
    seen.restarting, seen.restart_s = False, time.monotonic() - begun
    if state["change"]["state"] != "done":
        seen.wrong.append(f"rolling restart: {state['change']['error']}")
    seen.crashes = {name: [] for name in ENGINES}  # what was restarted on purpose begins anew


def victim(seen: Seen, rng: random.Random) -> str:
    """An engine that may crash again; empty: none may."""
    now = time.monotonic()
    recent = {name: [at for at in crashes if now - at < WINDOW_S] for name, crashes in seen.crashes.items()}
    return rng.choice([name for name, crashes in recent.items() if len(crashes) < CRASHES] or [""])


async def hit(target: Target, name: str, number: signal.Signals, seen: Seen) -> None:
    pid = await target.engine(name)
    os.kill(pid, number)
    seen.kills[number.name] += 1
    seen.hits_s.append(time.monotonic())
    seen.crashes[name].append(time.monotonic())
    async with asyncio.timeout(READY_S):
        while (await engines(target))[name]["ready"]:
            await asyncio.sleep(0.05)


async def all_ready(target: Target) -> None:
    async with asyncio.timeout(READY_S):
        while not all(each["ready"] for each in (await engines(target)).values()):
            await asyncio.sleep(0.1)


async def fleet(target: Target) -> dict[str, Any]:
    state: dict[str, Any] = (await get(target, "/engine/fleet")).json()
    return state


async def engines(target: Target) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in (await fleet(target))["engines"]}


async def change(target: Target, path: str) -> None:
    connection = await Connection.open(target)
    reply = await connection.ask(request(f"/engine/fleet/{path}", b""))
    connection.close()
    assert reply.status in (200, 202), reply


async def rows(target: Target, seen: Seen, questions: list[Question], requests: int) -> list[Row]:
    for kind in ("wrong", "truncated", "twice", "lost"):
        for said in getattr(seen, kind)[:5]:
            print(f"{kind}: {said}", file=sys.stderr)
    found = await engines(target)
    loads = {name: sum(each["load"].values()) for name, each in found.items()}
    held = "; ".join(filter(None, [await target.held(engine=name) for name in ENGINES]))
    changed = 0
    for name in ENGINES:
        outputs = await alone(target, name, [(each.path, each.body) for each in questions])
        changed += sum(output != each.outputs for output, each in zip(outputs, questions))
    kills = ", ".join(f"{name} {number}" for name, number in seen.kills.items())
    starts = ", ".join(f"{name} {each['starts']}" for name, each in found.items())
    tried = f"{requests} requests; {kills or 'no kills'}; starts: {starts}"
    endings = ", ".join(f"{name}: {number}" for name, number in sorted(seen.endings.items()))
    during = ", ".join(f"{name}: {number}" for name, number in sorted((+seen.during).items())) or "0 failed"
    texts = f"{seen.differ} before, {len(seen.wrong)} under load, {changed} afterwards"
    is_left = any(loads.values()) or held
    return [
        Row("fleet: endings", tried, endings, "-", None),
        Row("fleet: texts that differ", tried, texts, "0", not (seen.differ or seen.wrong or changed)),
        Row("fleet: clean or broken ends", tried, str(len(seen.truncated)), "0", not seen.truncated),
        Row("fleet: choices that end twice", tried, str(len(seen.twice)), "0", not seen.twice),
        Row("fleet: lost", tried, str(len(seen.lost)), "0", not seen.lost),
        Row(
            "fleet: rolling restart",
            f"once, in {seen.restart_s:.1f} s",
            during,
            "0 failed",
            seen.restart_s > 0 and not +seen.during,
        ),
        Row("fleet: left", tried, f"loads {loads}, {held or 'all free'}", "0, all free", not is_left),
    ]


@asynccontextmanager
async def served(*overrides: str) -> AsyncIterator[tuple[Target, Path]]:
    """A server of our own, and the file of its events."""
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as folder:
        events = Path(folder) / "events.jsonl"
        events.touch()
        exporter = ("exporter=[jsonl]", f"exporter.jsonl.path={events}")
        async with serve(*OVERRIDES, *exporter, *overrides) as target:
            yield target, events


async def main(options: argparse.Namespace) -> list[Row]:
    async with served(*options.overrides) as (target, events):
        return await attack(target, events, options.requests, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, requests=2000).parse_args(), main))
