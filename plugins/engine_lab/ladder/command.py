"""``engine ladder``: its flags; the overrides are the baseline's."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_lab.ladder.options import add_flags
from engine_lab.ladder.rungs import DEFAULT_RUNGS

NOTES = """\
The overrides are those of the baseline; preset=baseline unless they name another one.
A rung changes overrides or, as workload.stream, workload.static_first and workload.max_tokens, the requests.
Without --rung or --rungs:
  {}
Engines run as child processes, two at most, of which one has requests.
Every interval has its own level: of 20 comparisons of equal engines, one interval at 95 % misses.""".format(
    "\n  ".join(DEFAULT_RUNGS)
)


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.ladder.main import run

    return run(flags, overrides)


COMMAND = Command(
    "Measure what each optimisation changes: added one by one, and left out one by one.", _run, add_flags, notes=NOTES
)
