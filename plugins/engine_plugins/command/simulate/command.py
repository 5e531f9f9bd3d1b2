"""``engine simulate``: its flags."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_plugins.command.simulate.options import add_flags

NOTES = """\
Usage: engine simulate TRACE [overrides]. TRACE is a file of one of these formats, told by looking at it: engine (written
by exporter=[prometheus,trace]), azure, burstgpt, mooncake, dynamo, sharegpt.
Every figure is simulated. Same trace, calibration and seed: same bytes."""


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_plugins.command.simulate.main import run

    return run(flags, overrides)


COMMAND = Command("Simulate an engine under the load of a trace.", _run, add_flags, notes=NOTES)
