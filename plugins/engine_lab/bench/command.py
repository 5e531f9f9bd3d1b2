"""``engine bench``: the load generator; it takes no overrides."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_lab.bench.options import add_flags

NOTES = """\
A LENGTH is N, uniform:LOW,HIGH or lognormal:MEAN,SIGMA.
Exit status: 0 measured, 1 no request succeeded, 2 wrong usage, 3 the client lagged: run invalid."""


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.bench.main import run

    return run(flags)


COMMAND = Command(
    "Measure the latency of a running OpenAI-compatible server.",
    _run,
    add_flags,
    takes_overrides=False,
    notes=NOTES,
)
