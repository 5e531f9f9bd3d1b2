"""``engine bench-machine``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import USAGE, Command
from engine.contracts.config import between
from engine_lab.shared.errors import complain

NOTES = """\
Rates are the best of several rounds; what others run on the same cores lowers them. Those of integers are GOP/s.
AMX multiplies integers from 16 rows on; below, AVX512-VNNI does.
The first run also compiles kernels, which takes most of that time.
The engine measures once, at the first start, which instructions are fastest for bfloat16 weights.
CXX="g++ -march=haswell" shows and uses what an older processor has."""


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as the CPUs this process may run on")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well (- : to stdout, instead)")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    if flags.threads is not None:
        try:
            between("--threads", flags.threads, 1, os.cpu_count() or 1)
        except ValueError as error:
            return complain("bench-machine", error, USAGE)
    from engine_lab.bench_machine.main import run

    return run(flags.threads, flags.json)


COMMAND = Command(
    "Measure how fast this machine reads memory and multiplies, in about 15 seconds.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
