"""Runs the kernel functions of the built-in formats through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted, starts_interpreter


@starts_interpreter
def test_kernels_read_and_write_the_bytes_of_the_formats() -> None:
    suite = Path(__file__).with_name("test_kv_format_conformance.py")
    assert run_interpreted(suite, select="(FP8 or Int8) and its_") >= 12
