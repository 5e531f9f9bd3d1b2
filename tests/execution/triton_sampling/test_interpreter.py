"""Runs ``test_kernels.py`` through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted, starts_interpreter


@starts_interpreter
def test_the_kernels_equal_the_reference_under_the_interpreter() -> None:
    assert run_interpreted(Path(__file__).with_name("test_kernels.py")) >= 40
