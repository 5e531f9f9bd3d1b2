"""Entry of ``engine fleet``: shows the engines of a server, or changes them and says each step."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from engine.contracts.command import FAILED, INTERRUPTED, OK
from engine_lab.fleet.words import Asked
from engine_lab.shared.errors import complain
from engine_lab.shared.live import LiveEngine, LiveError

TIMEOUT_S = 10.0
POLL_S = 0.2
PATH = "/engine/fleet"
LONGEST_ID = len("255.255.255.255:65535")
"""Longer ids may take two lines."""


def run(asked: Asked, flags: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        return asyncio.run(_run(asked, flags))
    except LiveError as error:
        return complain("fleet", error, FAILED)
    except KeyboardInterrupt:
        if asked.action in ("restart", "resize", "drain"):
            return complain("fleet", f"the {asked.action} goes on; 'engine fleet {asked.url}' shows it", INTERRUPTED)
        return INTERRUPTED


async def _run(asked: Asked, flags: argparse.Namespace) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        engine, error = LiveEngine(session, asked.url, flags.api_key), ""
        say = partial(print, file=sys.stderr if flags.json else sys.stdout, flush=True)
        if asked.action == "show":
            state = await engine.json(PATH)
        else:
            state = await engine.post(asked.path(flags.force))
            if asked.action in ("restart", "resize"):
                state, error = await _changed(engine, state, say)
            elif asked.action == "drain":
                state = await _drained(engine, state, asked.what, say)
    if flags.json:
        print(msgspec.json.encode(state).decode())
    else:
        Console().print(table(state))
    return complain("fleet", error, FAILED) if error else OK


async def _changed(engine: LiveEngine, state: Any, say: Callable[[str], None]) -> tuple[Any, str]:
    """Say each step until the change has ended. Returns the last answer, and why it failed; empty: it has not."""
    number, said = state["change"]["number"], 0
    while True:
        change = state["change"]
        if change["number"] != number:
            return state, "another change has begun since; whether this one failed is not known"
        for step in change["steps"][said:]:
            say(line(step))
        said = len(change["steps"])
        if change["state"] != "running":
            failed = change["state"] != "done"
            return state, change["error"] or "the server ended it" if failed else ""
        await asyncio.sleep(POLL_S)
        state = await engine.json(PATH)


async def _drained(engine: LiveEngine, state: Any, name: str, say: Callable[[str], None]) -> Any:
    """Wait until it has nothing left. Returns the last answer. Raises :class:`LiveError` if it is undrained."""
    before = None
    while True:
        (found,) = [each for each in state["engines"] if each["id"] == name]
        left, said = found["load"]["sequences"], f"{counted(found['load']['sequences'])} left{why(found)}"
        if said != before:
            say(f"{name}  {said}")
        if not left:
            return state
        if found["ready"]:
            raise LiveError(f"{name} takes requests again: it was undrained meanwhile")
        before = said
        await asyncio.sleep(POLL_S)
        state = await engine.json(PATH)


def line(step: Any) -> str:
    """One step of a change."""
    left = f", {counted(step['sequences'])} left{why(step)}" if step["step"] in ("draining", "aborting") else ""
    reason = " for another engine" if step["step"] == "waiting" else ""
    return f"{step['at_s']:7.1f} s  {step['engine']}  {step['step']}{reason}{left}"


def why(found: Any) -> str:
    """Sequences that stay, by reason, in words; empty: none."""
    return "".join([f" ({count} stay: {reason})" for reason, count in found.get("staying", {}).items()])


def counted(sequences: int) -> str:
    return f"{sequences} sequence" + ("s" if sequences != 1 else "")


def table(state: Any) -> Table:
    """The engines, a line each."""
    shown = Table(box=None, pad_edge=False)
    several = len({each["model"] for each in state["engines"]}) > 1
    roles = len({each.get("role") for each in state["engines"]}) > 1
    here = any(each.get("pid") for each in state["engines"])
    longest = max(len(each["id"]) for each in state["engines"])
    shown.add_column("engine", overflow="fold", no_wrap=longest <= LONGEST_ID)
    for column in (*["models"] * several, *["role"] * roles, "state", "ready"):
        shown.add_column(column, overflow="fold")
    if elsewhere := any(each.get("host") for each in state["engines"]):
        shown.add_column("host", overflow="fold")
    for column in (*["pid"] * here, "starts", "sequences", "queued\ntokens", "running\ntokens"):
        shown.add_column(column, justify="right", no_wrap=True)
    for each in state["engines"]:
        load = each["load"]
        pid = [each.get("pid") or "-"] * here
        counts = (*pid, each["starts"], load["sequences"], load["queued_tokens"], load["running_tokens"])
        words = (
            *[each["model"]] * several,
            *[each.get("role", "-")] * roles,
            each["state"],
            "yes" if each["ready"] else "no",
        )
        words = (*words, *[each.get("host") or "here"] * elsewhere)
        shown.add_row(each["id"], *words, *map(str, counts))
    return shown
