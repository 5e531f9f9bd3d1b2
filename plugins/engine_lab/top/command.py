"""``engine top``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import Command
from engine.contracts.percentiles import TOO_FEW
from engine_lab.shared.argument_types import number

NOTES = f"""\
Rates are means of the last 5 seconds; figures of steps, drafts and the prefix cache are of the last minute; percentiles
of the last five; slowest are those of the last 32 requests. {TOO_FEW}.
Of several engines each has a row, the other figures are of all together, and --engine shows one in full.
q and Ctrl-C leave."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the engine (%(default)s)")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--engine", metavar="ID", help="of a server with several: this one alone, in full")
    add("--interval", type=number(0.1), default=1.0, metavar="S", help="seconds between two looks (%(default)g)")
    add("--once", action="store_true", help="look twice, an interval apart; print that and end")
    add("--json", action="store_true", help="a line of JSON for each look")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.top.main import run

    return run(flags)


COMMAND = Command(
    "Watch a running engine: rates, percentiles, batch, KV, and its slowest requests.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
