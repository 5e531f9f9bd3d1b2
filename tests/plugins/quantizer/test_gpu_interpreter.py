"""Runs the GPU tests of this folder through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interpreted import run_interpreted, starts_interpreter

HERE = Path(__file__).parent


@starts_interpreter
@pytest.mark.parametrize(("name", "at_least"), [("loaders", 100), ("linear", 100)])
def test_kernels_multiply_by_what_weights_stand_for_under_the_interpreter(name: str, at_least: int) -> None:
    assert run_interpreted(HERE / f"test_gpu_{name}.py", may_skip=name == "linear") >= at_least
