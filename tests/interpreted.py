"""Runs tests through Triton's interpreter. It replaces functions while triton is imported, and other tests of a run may
have imported it already; so it gets processes of its own, side by side. (That of Triton 3.6 needs numpy < 2.4.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run_interpreted(*groups: Sequence[Path]) -> int:
    """One process for each group of files. Returns how many tests passed; asserts that none failed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", *map(str, files)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for files in groups
    ]
    passed = 0
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        found = re.search(r"(\d+) passed", output)
        assert found is not None, output
        passed += int(found[1])
    return passed
