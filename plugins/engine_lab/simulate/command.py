"""``engine simulate``: its flags."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_lab.simulate.options import add_flags

NOTES = """\
Usage: engine simulate TRACE [overrides]. The trace's format is told by looking at it: engine (which exporter trace
writes), azure, burstgpt, mooncake, dynamo or sharegpt.
Every figure is simulated but those that the trace measured itself. Same trace, calibration and seed: same bytes.
Exit status: 0 all sets are simulated, 1 a compared one is not, 2 wrong usage."""


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.simulate.main import run

    return run(flags, overrides)


COMMAND = Command("Simulate an engine under the load of a trace.", _run, add_flags, notes=NOTES)
