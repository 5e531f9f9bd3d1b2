"""Runs ``test_triton.py`` through Triton's interpreter.

The interpreter replaces functions while triton is imported, and other tests of this run may have imported it
already; so it gets a process of its own. (The interpreter of Triton 3.6 needs numpy < 2.4.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="test_triton.py runs in this very process")
def test_the_kernels_equal_the_reference_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).with_name("test_triton.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 105 and "skipped" not in done.stdout, done.stdout
