"""``engine tune``: its flags; the overrides are the baseline's, and those with several values the grid."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_lab.tune.options import GRID, add_flags

NOTES = """\
The overrides are those of the baseline. Those in Hydra's sweep syntax are the grid; without any it is
  {}
without the keys that an override has. Sets that lose more than 1% of quality are dropped, unless --quality or
--no-quality say otherwise. Engines run as child processes, one run of one engine at a time.
Exit status: 0 a preset was written, 1 nothing was measured, 2 wrong usage, 3 no set is named, 130 interrupted."""
NOTES = NOTES.format("\n  ".join(GRID))


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.tune.main import run

    return run(flags, overrides)


COMMAND = Command("Find the plugin set for an SLO, prove it, and write it as a preset.", _run, add_flags, notes=NOTES)
