"""``engine fleet``: its words and flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import USAGE, Command
from engine_lab.fleet.words import parse
from engine_lab.shared.errors import complain

NOTES = """\
engine fleet [URL]               the engines: state, and what was sent to each (http://127.0.0.1:8000)
engine fleet restart URL [ID]    all of them, one at a time, or one: no request fails
engine fleet drain URL ID        gives an engine no more requests, waits until it has none left
engine fleet undrain URL ID      gives it requests again
engine fleet resize URL N        N engines up, of the fleet.replicas that were started

What a drained engine has goes on at others, running answers too. A restart waits at most server.drain_s for what
cannot; it says why.
Ctrl-C ends the command, not what it began.
Exit status: 0 done, 1 refused or failed, 2 wrong usage."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="[restart|drain|undrain|resize] [URL] [ID|N]",
        help="what to do (to show, without), at which server, with which engine or how many: see below",
    )
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--force", action="store_true", help="though no other engine takes requests meanwhile: they are refused")
    add("--json", action="store_true", help="print the server's answer at the end, not a table")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        asked = parse(flags.words)
    except ValueError as error:
        return complain("fleet", error, USAGE)
    from engine_lab.fleet.main import run

    return run(asked, flags)


COMMAND = Command(
    "Show the engines behind a server; drain, restart, stop and start them while it serves.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
