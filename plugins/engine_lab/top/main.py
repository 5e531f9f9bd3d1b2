"""Entry of ``engine top``: looks, shows, and looks again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.shared.errors import complain
from engine_lab.shared.live import LiveEngine, LiveError
from engine_lab.top.frame import Frame, History
from engine_lab.top.poll import Poll, about, poll, together
from engine_lab.top.render import render

TIMEOUT_S = 10.0
ALL = ""


@dataclass(slots=True)
class Watch:
    """The engines of a server and what they said in the last minute."""

    server: LiveEngine
    engine: str | None = None
    """The id of the one that is watched, ``None``: all."""
    histories: dict[str, History] = field(default_factory=dict)
    """Of each engine, by its id, and of all together under :data:`ALL`."""
    model: str = ""
    runs_on: str = ""
    lost_s: float | None = None
    """When it stopped answering."""

    async def look(self) -> Frame:
        """Raises :class:`LiveError`."""
        try:
            engines = await self._engines()
            if not self.model:
                ready = next((name for name, said in engines.items() if said.get("ready")), next(iter(engines)))
                self.model, self.runs_on = await about(self.server.of(ready))
                self.runs_on = f"{len(engines)} engines, {self.runs_on}" if len(engines) > 1 else self.runs_on
            polls = await asyncio.gather(*[poll(self.server.of(name)) for name in engines])
        except LiveError:
            self.model = ""  # what answers next may be another engine
            self.lost_s = self.lost_s or time.monotonic()
            raise
        self.lost_s = None
        frames = {name: self._frame(name, found) for name, found in zip(engines, polls, strict=True)}
        if len(frames) == 1:
            return next(iter(frames.values()))
        states = {name: str(said.get("why_not") or said.get("state")) for name, said in engines.items()}
        hosts = {name: f"pid {said['pid']} on {said['host']}" for name, said in engines.items() if said.get("host")}
        whole = self._frame(ALL, together(polls))
        return msgspec.structs.replace(whole, engines=frames, states=states, hosts=hosts)

    async def _engines(self) -> dict[str, dict[str, Any]]:
        """Those that are watched, by id. Raises :class:`LiveError`."""
        if self.engine is None:
            return await self.server.fleet()
        await self.server.chosen(self.engine)
        return {self.engine: {"ready": True}}

    def _frame(self, name: str, found: Poll) -> Frame:
        history = self.histories.setdefault(name, History())
        history.add(found)
        return history.frame()

    def title(self, width: int) -> Text:
        said = Text.assemble(("engine top", "bold"), "  ", (self.model, "bold green"), f"  {self.runs_on}")
        url = self.server.url if self.engine is None else f"{self.server.url} {self.engine}"
        if said.cell_len + len(url) + 2 > width:
            said.truncate(max(0, width - len(url) - 2), overflow="ellipsis")
        return said + Text(" " * max(2, width - said.cell_len - len(url))) + Text(url, style="dim")


def run(flags: Any) -> int:
    """Returns the exit status; Ctrl-C raises ``KeyboardInterrupt``."""
    console = Console()
    if not (flags.once or flags.json or console.is_terminal):
        return complain("top", "stdout is no terminal; add --once or --json", USAGE)
    try:
        return asyncio.run(_watch(flags, console))
    except LiveError as error:
        return complain("top", error, FAILED)


async def _watch(flags: Any, console: Console) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        watch = Watch(LiveEngine(session, flags.url, flags.api_key), flags.engine)
        frame = await watch.look()  # nobody wants to watch a wrong URL
        if flags.once:
            await asyncio.sleep(flags.interval)
            frame = await watch.look()
            if flags.json:
                _print_json(frame)
            else:
                console.print(render(watch.title(console.width), frame, console.width))
        elif flags.json:
            while True:
                _print_json(frame)
                await asyncio.sleep(flags.interval)
                frame = await watch.look()
        else:
            await _repeat(watch, frame, console, flags.interval)
    return OK


def _print_json(frame: Frame) -> None:
    print(msgspec.json.encode(frame).decode(), flush=True)


async def _repeat(watch: Watch, frame: Frame, console: Console, interval_s: float) -> None:
    """Until q is pressed. While the engine does not answer, its last frame stays."""
    left = asyncio.Event()
    with keys(left), Live(console=console, screen=True, auto_refresh=False) as live:
        title = watch.title(console.width)
        while True:
            live.update(render(title, frame, *console.size), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), interval_s)
            if left.is_set():
                return
            try:
                frame = await watch.look()
                title = watch.title(console.width)
            except LiveError as error:
                since = time.monotonic() - (watch.lost_s or 0.0)
                title = Text.from_markup(f"[bold red]no answer for {since:.0f} s[/]  {escape(str(error))}")
                title.truncate(console.width, overflow="ellipsis")


@contextlib.contextmanager
def keys(left: asyncio.Event) -> Iterator[None]:
    """Sets ``left`` when q is pressed. Where stdin is no terminal there are no keys."""
    if not sys.stdin.isatty():
        yield
        return
    stdin, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def pressed() -> None:
        if b"q" in os.read(stdin, 64).lower():
            left.set()

    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, pressed)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
