"""Runs the kernel functions of the built-in formats through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the tests run in this very process")
def test_kernels_read_and_write_the_bytes_of_the_formats() -> None:
    suite = Path(__file__).with_name("test_kv_format_conformance.py")
    command = [sys.executable, "-m", "pytest", "-x", str(suite), "-k", "(FP8 or Int8) and its_"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 12 and "skipped" not in done.stdout, done.stdout
