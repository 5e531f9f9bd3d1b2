"""``engine sweep``: its flags; the overrides name the plugin sets."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine_lab.sweep.options import add_flags

NOTES = """\
Overrides are in Hydra's sweep syntax: drafter=none,ngram  quantizer='choice(checkpoint,int8)'  drafter='glob(e*)'
scheduler.token_budget='range(512,2049,512)'; drafter=* are all options of the slot but auto. All combinations are sets.
Engines run as child processes, one run of one engine at a time.
Exit status: 0 measured, whether or not there is a best set; 1 nothing was, 2 wrong usage, 130 interrupted."""


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.sweep.main import run

    return run(flags, overrides)


COMMAND = Command(
    "Measure many plugin sets under one load, and name the best if there is one.", _run, add_flags, notes=NOTES
)
