"""Runs the GPU tests of this folder through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the tests run in this very process")
@pytest.mark.parametrize(("name", "least"), [("test_gpu_loaders.py", 160), ("test_gpu_linear.py", 90)])
def test_kernels_multiply_by_what_weights_stand_for_under_the_interpreter(name: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-x", str(HERE / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least, done.stdout
