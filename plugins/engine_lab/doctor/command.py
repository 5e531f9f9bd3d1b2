"""``engine doctor``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import USAGE, Command
from engine.contracts.config import at_least
from engine_lab.shared.errors import complain

LEAST_PAIRS = 6
"""Fewer have no interval at 95 %."""
URL = "http://127.0.0.1:8000"
NOTES = """\
A finding is what three windows agree on; what only some of them show is named as an abstention. Where few requests end
in a window, it goes on, up to a minute.
--rules MODULE:NAME adds rules of your own: a sequence of engine_lab.doctor.rule.Rule.
Exit status: 0 diagnosed, with findings or without, 1 the engine cannot be read, 2 wrong usage."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", help=f"a running engine ({URL})")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--engine", metavar="ID", help="of a server with several: which one (the first)")
    add(
        "--window",
        type=float,
        default=10.0,
        metavar="S",
        help="length of each of three windows, at least (%(default)g)",
    )
    add("--passive", action="store_true", help="send no requests of its own: what is between it and --url is not seen")
    add("--record", metavar="FILE", help="keep the evidence")
    add("--evidence", metavar="FILE", help="diagnose kept evidence; no engine is asked")
    add("--rules", metavar="MODULE:NAME", action="append", default=[], help="more rules, repeatable")
    add("--json", action="store_true", help="print JSON")
    add("--verify", action="store_true", help="put the first finding to the test, on a shadow engine here")
    add("--workload", metavar="FLAGS", help="of engine ladder, for --verify (default: the recorded requests again)")
    add("--pairs", type=int, default=LEAST_PAIRS, metavar="N", help="pairs of runs of --verify (%(default)s)")
    add(
        "--ledger",
        metavar="FILE",
        nargs="?",
        const="",
        help="where --verify keeps predictions and results; alone: print them and how many were right",
    )
    add("--causes", action="store_true", help="list the causes there are rules for and stop")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        at_least("--window", flags.window, 1.0)
        at_least("--pairs", flags.pairs, LEAST_PAIRS)
        if flags.workload and not flags.verify:
            raise ValueError("--workload is of the shadow engine: add --verify")
        if flags.evidence and flags.record:
            raise ValueError("--record needs a running engine, --evidence asks none: give one of them")
        if flags.evidence and flags.url is not None:
            raise ValueError("--url is of a running engine, --evidence asks none: give one of them")
        if flags.evidence and flags.engine is not None:
            raise ValueError("--engine is of a running server, --evidence asks none: give one of them")
    except ValueError as error:
        return complain("doctor", error, USAGE)
    from engine_lab.doctor.main import run

    flags.url = URL if flags.url is None else flags.url
    return run(flags)


COMMAND = Command(
    "Say why a running engine is slow, what to change, and what that should bring.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
