"""Runs the GPU tests of this folder through Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.interpreted import run_interpreted

HERE = Path(__file__).parent


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the tests run in this very process")
def test_kernels_multiply_by_what_weights_stand_for_under_the_interpreter() -> None:
    assert run_interpreted([HERE / "test_gpu_loaders.py"], [HERE / "test_gpu_linear.py"]) >= 250
