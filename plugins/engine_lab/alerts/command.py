"""``engine alerts``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import USAGE, Command
from engine.contracts.config import at_least
from engine_lab.alerts.slo import SLO_CLASSES
from engine_lab.shared.errors import complain

NOTES = """\
It reads /engine/counters of each engine for a while and evaluates the rules on what it saw. Windows reach back as far
as it has watched: --watch goes on, says when a rule begins or ceases to fire, and waits as long as Prometheus would
before it does.
Exit status: 0 nothing fires, 2 wrong usage, 3 something fires."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="a running engine (%(default)s)")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--seconds", type=float, default=30.0, metavar="S", help="how long to read before evaluating (%(default)g)")
    add("--every", type=float, default=5.0, metavar="S", help="between two readings (%(default)g)")
    add("--watch", action="store_true", help="go on until Ctrl-C")
    add("--slo", choices=tuple(SLO_CLASSES), default="chat", help="whose limits burn rates are of (%(default)s)")
    add("--objective", type=float, default=0.99, metavar="SHARE", help="that should keep them (%(default)g)")
    add("--rag", action="store_true", help="prompts share most of their text: the prefix cache should find it")
    add("--rules", action="store_true", help="print the rules for Prometheus and stop")
    add("--job", default="engine", metavar="NAME", help="Prometheus' scrape job, for --rules (%(default)s)")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        at_least("--every", flags.every, 0.1)
        at_least("--seconds", flags.seconds, flags.every)
        if not 0.0 < flags.objective < 1.0:
            raise ValueError(f"--objective {flags.objective}: expected a share between 0 and 1")
        if '"' in flags.job or "\\" in flags.job:
            raise ValueError(f"--job {flags.job}: expected a name without quotes and backslashes")
    except ValueError as error:
        return complain("alerts", error, USAGE)
    from engine_lab.alerts.main import run

    return run(flags)


COMMAND = Command(
    "Say what is wrong with a running engine, by the rules that are also Prometheus'.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
