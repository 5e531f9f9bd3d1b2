"""Runs this folder's kernel tests through Triton's interpreter.

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

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
KERNEL_TESTS = tuple(
    f"test_{name}.py" for name in ("linear", "heads", "rowwise", "lowering", "models", "narrow_types")
)


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the tests run in this very process")
def test_the_kernels_equal_the_reference_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", *(str(HERE / name) for name in KERNEL_TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 200 and "skipped" not in done.stdout, done.stdout
