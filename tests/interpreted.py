"""Runs tests through Triton's interpreter. It replaces functions while triton is imported, and other tests of a run may
have imported it already; so it gets a process of its own. (That of Triton 3.6 needs numpy < 2.4.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

starts_interpreter = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="the tests it starts run in this very process"
)
"""For tests that call :func:`run_interpreted`."""


def run_interpreted(*files: Path, select: str = "", may_skip: bool = False) -> int:
    """Run the tests of ``files`` (those that the ``-k`` expression ``select`` names) under the interpreter.

    Returns how many passed. Asserts that none failed and, unless they ``may_skip`` what a plugin does not offer, none
    was skipped.
    """
    command = [sys.executable, "-m", "pytest", "-n0", "-x", *map(str, files), *(["-k", select] if select else [])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert may_skip or "skipped" not in done.stdout, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])
