"""Runs this folder's kernel tests through Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.interpreted import run_interpreted

HERE = Path(__file__).parent
KERNELS, MODELS = ("linear", "heads", "rowwise", "lowering", "narrow_types"), ("models",)


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the tests run in this very process")
def test_the_kernels_equal_the_reference_under_the_interpreter() -> None:
    assert run_interpreted(*([HERE / f"test_{name}.py" for name in names] for names in (KERNELS, MODELS))) >= 280
