"""Two servers behind ``engine gateway``: one is killed with its engine (SIGKILL) every 10 s and started again, one is
stopped for 12 s (SIGSTOP), one is drained at the gateway and put back, while clients ask and go away.

Requests are those of ``tools.attack.fleet``. Every text is known: the first server was asked before. Bar: no text
differs, no stream ends cleanly before its end, no choice ends twice; nothing fails that has no output, unless two
servers were hit meanwhile; whole answers never fail with one; loads at the gateway, rows and blocks are 0 at the end.

    python -m tools.attack.gateway --requests 2000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tools.attack.client import Answer, ask
from tools.attack.fleet import CLIENTS, KILL_S, LEAVE, Question, Seen, all_ready, change, engines, leave, note, question
from tools.attack.harness import Row, Target, arguments, run

PORTS = (9451, 9452)
QUESTIONS = 40
STOPPED_S = 12.0
STOP_AT, DRAIN_AT = 0.3, 0.6
"""How many of the requests are answered by then."""
BY_DEATH = {"bad_gateway", "target_silent", "target_timeout"}


@dataclass(slots=True)
class Servers:
    """``engine serve`` at each port, killed and started again."""

    overrides: Sequence[str]
    folder: Path
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, port: int) -> None:
        log = (self.folder / f"{port}.log").open("ab")
        words = [sys.executable, "-m", "engine.cli.main", "serve", f"server.port={port}", *self.overrides]
        self.running[port] = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def signal(self, port: int, number: signal.Signals) -> None:
        """To the server and its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self.running[port].pid, number)

    def end(self) -> None:
        for port, process in self.running.items():
            self.signal(port, signal.SIGCONT)
            self.signal(port, signal.SIGKILL)
            process.wait()


async def attack(gateway: Target, servers: Servers, requests: int, seed: int) -> list[Row]:
    rng, seen, numbers = random.Random(seed), Seen(), iter(range(requests))
    await all_ready(gateway)
    asked = [question(rng) for _ in range(QUESTIONS)]
    alone = Target("127.0.0.1", PORTS[0])
    answers = [await ask(alone, path, body) for path, body in asked]
    questions = [Question(path, body, answer.outputs) for (path, body), answer in zip(asked, answers)]

    async def client(number: int) -> None:
        mine = random.Random(f"{seed}:{number}")
        for _ in numbers:
            await one(gateway, mine.choice(questions), mine, seen)
            seen.answered += 1

    chaos = asyncio.create_task(disturb(gateway, servers, rng, seen, requests))
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    chaos.cancel()
    ended = (await asyncio.gather(chaos, return_exceptions=True))[0]
    if isinstance(ended, Exception):
        raise ended
    for port in PORTS:  # it may have been ended amid a stop or a drain
        servers.signal(port, signal.SIGCONT)
        await change(gateway, f"undrain?engine=127.0.0.1:{port}")
    await all_ready(gateway)
    return await rows(gateway, seen, requests)


async def one(gateway: Target, asked: Question, rng: random.Random, seen: Seen) -> None:
    body = asked.body | {"stream": rng.random() < 0.6}
    if rng.random() < LEAVE:
        await leave(gateway, asked.path, body, rng)
        seen.endings["left"] += 1
        return
    begun_s = time.monotonic()
    answer = await ask(gateway, asked.path, body)
    name = f"{'stream' if body['stream'] else 'whole'} {answer.ending} {answer.code or answer.status}"
    seen.endings[name] += 1
    if answer.ending in ("error", "refused") and answer.code in BY_DEATH:
        hits = sum(begun_s <= at_s for at_s in seen.hits_s)
        if not answer.outputs and hits < 2:
            seen.lost.append(f"{name} after {time.monotonic() - begun_s:.1f} s and {hits} hits: {answer.text}")
        answer = Answer(answer.ending, code="engine_dead", outputs=answer.outputs, finishes=answer.finishes)
    note(asked, answer, name, seen)


async def disturb(gateway: Target, servers: Servers, rng: random.Random, seen: Seen, requests: int) -> None:
    """Until cancelled."""
    stopped = drained = False
    while True:
        await asyncio.sleep(KILL_S)
        await all_ready(gateway)
        share, port = seen.answered / requests, rng.choice(PORTS)
        if not stopped and share >= STOP_AT:
            stopped = True
            seen.kills["SIGSTOP"] += 1
            seen.hits_s.append(time.monotonic())
            servers.signal(port, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            servers.signal(port, signal.SIGCONT)
        elif not drained and share >= DRAIN_AT:
            drained = True
            await change(gateway, f"drain?engine=127.0.0.1:{port}")
            await asyncio.sleep(3)
            await change(gateway, f"undrain?engine=127.0.0.1:{port}")
            seen.kills["drain"] += 1
        else:
            seen.kills["SIGKILL"] += 1
            seen.hits_s.append(time.monotonic())
            servers.signal(port, signal.SIGKILL)
            servers.running[port].wait()
            servers.start(port)
            await asyncio.sleep(2)  # until the gateway has seen it


async def rows(gateway: Target, seen: Seen, requests: int) -> list[Row]:
    for kind in ("wrong", "truncated", "twice", "lost"):
        for said in getattr(seen, kind)[:5]:
            print(f"{kind}: {said}", file=sys.stderr)
    loads = {name: sum(each["load"].values()) for name, each in (await engines(gateway)).items()}
    held = "; ".join(filter(None, [await Target("127.0.0.1", port).held() for port in PORTS]))
    tried = f"{requests} requests; {', '.join(f'{name} {number}' for name, number in seen.kills.items())}"
    endings = ", ".join(f"{name}: {number}" for name, number in sorted(seen.endings.items()))
    return [
        Row("gateway: endings", tried, endings, "-", None),
        Row("gateway: texts that differ", tried, str(len(seen.wrong)), "0", not seen.wrong),
        Row("gateway: clean or broken ends", tried, str(len(seen.truncated)), "0", not seen.truncated),
        Row("gateway: choices that end twice", tried, str(len(seen.twice)), "0", not seen.twice),
        Row("gateway: lost before a token", tried, str(len(seen.lost)), "0", not seen.lost),
        Row(
            "gateway: left",
            tried,
            f"loads {loads}, {held or 'all free'}",
            "0, all free",
            not any(loads.values()) and not held,
        ),
    ]


@asynccontextmanager
async def served(*overrides: str) -> AsyncIterator[tuple[Target, Servers]]:
    """A gateway of our own, and the servers behind it."""
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        folder = Path(name)
        servers = Servers(overrides, folder)
        log = folder / "gateway.log"
        words = [sys.executable, "-m", "engine.cli.main", "gateway", "server.port=0"]
        urls = [f"http://127.0.0.1:{port}" for port in PORTS]
        try:
            for port in PORTS:
                servers.start(port)
            with log.open("wb") as output:
                process = subprocess.Popen([*words, *urls], stdout=output, stderr=output)
            while (
                line := next((each for each in log.read_text().splitlines() if each.startswith("ready: ")), None)
            ) is None:
                if process.poll() is not None:
                    raise SystemExit(f"error: the gateway did not start:\n{log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)
            yield Target("127.0.0.1", int(line.rpartition(":")[2].partition("/")[0]), process, log), servers
        finally:
            process.terminate()
            process.wait()
            servers.end()


async def main(options: argparse.Namespace) -> list[Row]:
    async with served(*options.overrides) as (gateway, servers):
        return await attack(gateway, servers, options.requests, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, requests=2000).parse_args(), main))
