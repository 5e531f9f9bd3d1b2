"""Runs the kernel functions of the built-in formats, and those of the guide, through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted, starts_interpreter

FOLDER = Path(__file__).parent


@starts_interpreter
def test_kernels_read_and_write_the_bytes_of_the_formats() -> None:
    suites = (FOLDER / "test_kv_format_conformance.py", FOLDER / "test_documented_example.py")
    assert run_interpreted(*suites, select="(FP8 or Int8) and its_") >= 3 * 7
