"""What the programs of this folder share: a server to attack, what is seen of it from outside, and the table.

Each program is run from the root of a clone (``python -m tools.attack.fuzz --help``), starts ``engine serve`` with the
bundled model on a free loopback port unless ``--url`` names a server on this machine, prints one row per attack, and
exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.attack.client import CHAT, Reply, ask, get

START_S = 120.0
END_S = 60.0
IDLE_S = 30.0
QUESTION = {"model": "bundled", "messages": [{"role": "user", "content": "What does json.dumps do?"}]}
CANARY = QUESTION | {"temperature": 0, "max_tokens": 24}


@dataclass(frozen=True, slots=True)
class Row:
    """One attack. ``held`` is ``None`` where a figure is only reported; ``measured``: the bar
    is a time or an amount, which another machine may miss."""

    attack: str
    tried: str
    result: str
    bar: str
    held: bool | None
    measured: bool = False


@dataclass(slots=True)
class Target:
    """A server under attack, and how it was before."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    """What the server writes to stderr."""
    engine_pid: int = 0
    api_pid: int = 0
    answer: str = ""
    """To the canary request."""

    async def attach(self) -> None:
        """Note the processes and the canary's answer."""
        self.engine_pid = await self.engine()
        self.api_pid = self.process.pid if self.process else parent(self.engine_pid)
        self.answer = await self.canary()

    async def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = (await get(self, "/engine/plan")).json()
        return plan

    async def stats(self, engine: str = "") -> dict[str, Any]:
        """``engine``: its id; the first one without."""
        stats: dict[str, Any] = (await get(self, f"/engine/stats{of(engine)}")).json()
        return stats

    async def engine(self, engine: str = "") -> int:
        """The process id of the engine."""
        return int((await get(self, f"/engine/plan{of(engine)}")).json()["engine"]["pid"])

    async def counter(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        page = (await get(self, "/metrics")).body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    async def canary(self) -> str:
        """The greedy answer to a fixed question."""
        answer = await ask(self, CHAT, CANARY)
        return f"{answer.ending} {answer.status}: {answer.text}"

    async def same(self) -> bool:
        """The canary is answered with the same bytes as at first."""
        return await self.canary() == self.answer

    async def is_ready(self) -> bool:
        try:
            return (await get(self, "/ready")).status == 200
        except OSError:
            return False

    async def until_ready(self, limit_s: float = START_S) -> float:
        """Seconds until ``/ready`` is 200. Raises ``TimeoutError``."""
        begun = time.monotonic()
        async with asyncio.timeout(limit_s):
            while not await self.is_ready():
                await asyncio.sleep(0.05)
        return time.monotonic() - begun

    async def held(self, limit_s: float = IDLE_S, engine: str = "") -> str:
        """What is still held once nothing should run: empty as soon as every row and KV block is free again."""
        ends = time.monotonic() + limit_s
        while True:
            stats = await self.stats(engine)
            left = {name: stats[name] for name in ("running", "waiting", "rows_used") if stats[name]}
            for blocks in stats["blocks"]:
                if blocks["leased"]:
                    left[f"{blocks['group']} blocks leased"] = blocks["leased"]
                if blocks["free"] + blocks["cached"] + blocks["leased"] != blocks["total"]:
                    left[f"{blocks['group']} blocks lost"] = 1
            if not left or time.monotonic() > ends:
                return ", ".join(f"{name} {value}" for name, value in left.items())
            await asyncio.sleep(0.1)

    def log_lines(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log else 0


def of(engine: str) -> str:
    """The query that names an engine."""
    return f"?engine={engine}" if engine else ""


def limit(kind: int, most: int) -> Callable[[], None]:
    """For ``before`` of :func:`serve`: a limit of the process, see ``resource.setrlimit``."""
    return partial(resource.setrlimit, kind, (most, most))


def rss_mb(pid: int) -> float:
    return _status(pid, "VmRSS") / 1024


def peak_mb(pid: int) -> float:
    """The most resident memory since :func:`reset_peak`."""
    return _status(pid, "VmHWM") / 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return _status(pid, "Threads")


def parent(pid: int) -> int:
    return _status(pid, "PPid")


def engines_of(pid: int) -> list[int]:
    """The engine processes below an API process, ready or not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"engine.startup.child" in (folder / "cmdline").read_bytes() and parent(int(folder.name)) == pid:
                found.append(int(folder.name))
        except (OSError, LookupError):
            continue  # it ended
    return found


def _status(pid: int, name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[name].split()[0])


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)] if ordered else 0.0


def token_ids(rng: random.Random, count: int) -> list[int]:
    """A random prompt."""
    return [rng.randrange(100, 3000) for _ in range(count)]


def is_error_object(reply: Reply) -> bool:
    """OpenAI's error object of exactly four keys."""
    try:
        shown = reply.json()
        return set(shown) == {"error"} and set(shown["error"]) == {"message", "type", "param", "code"}
    except (ValueError, TypeError):
        return False


@asynccontextmanager
async def serve(
    *overrides: str, before: Callable[[], object] | None = None, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Target]:
    """A server of our own. ``before`` runs in its process first; ``environment`` adds to ours."""
    # Whoever only attaches to a server may have no engine installed.
    from engine.startup.lifetime import end_with

    ours = os.getpid()

    def prepare() -> None:
        end_with(ours)
        if before is not None:
            before()

    with tempfile.NamedTemporaryFile(prefix="engine-attack-", suffix=".log") as log:
        command = [sys.executable, "-m", "engine.cli.main", "serve", "server.port=0", *overrides]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, **(environment or {})},
            preexec_fn=prepare,
        )
        try:
            target = Target("127.0.0.1", await _port(process, Path(log.name)), process, Path(log.name))
            await target.attach()
            yield target
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(int(START_S / 0.05)):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ready: "):
                return int(line.rpartition(":")[2].partition("/")[0])
        if process.poll() is not None:
            break
        await asyncio.sleep(0.05)
    raise SystemExit(f"error: the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@asynccontextmanager
async def attached(url: str) -> AsyncIterator[Target]:
    """A server that runs on this machine already."""
    at = urlsplit(url)
    target = Target(at.hostname or "127.0.0.1", at.port or 80)
    await target.attach()
    yield target


def arguments(doc: str | None, *, url: bool = True, **counts: float) -> argparse.ArgumentParser:
    """The options of a program: ``--url``, ``--json``, ``--seed``, its counts with their defaults, and overrides."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if url:
        parser.add_argument("--url", help="a server on this machine; without it, one is started")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("overrides", nargs="*", help="for the servers that are started, such as threads=1")
    return parser


def target_of(options: argparse.Namespace, *overrides: str) -> AbstractAsyncContextManager[Target]:
    """The server that the options name, or one of our own with ``overrides`` and those of the options."""
    return attached(options.url) if options.url else serve(*overrides, *options.overrides)


def run(options: argparse.Namespace, attack: Callable[[argparse.Namespace], Awaitable[list[Row]]]) -> int:
    """Attack, print the table, write the rows. Returns the exit code."""

    async def attacked() -> list[Row]:
        return await attack(options)

    rows = asyncio.run(attacked())
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.held is False for row in rows) else 0


def table(rows: Sequence[Row]) -> str:
    shown = {None: "-", True: "yes", False: "NO"}
    lines = ["| attack | tried | result | bar | held |", "|---|---|---|---|---|"]
    lines += [f"| {row.attack} | {row.tried} | {row.result} | {row.bar} | {shown[row.held]} |" for row in rows]
    return "\n".join(lines)
