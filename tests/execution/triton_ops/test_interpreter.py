"""Runs this folder's kernel tests through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreted import run_interpreted, starts_interpreter

HERE = Path(__file__).parent


@starts_interpreter
@pytest.mark.parametrize(
    ("names", "at_least"),
    [(("linear", "heads", "rowwise", "lowering", "narrow_types"), 230), (("models",), 28)],
    ids=["kernels", "models"],
)
def test_the_kernels_equal_the_reference_under_the_interpreter(names: tuple[str, ...], at_least: int) -> None:
    assert run_interpreted(*(HERE / f"test_{name}.py" for name in names)) >= at_least
