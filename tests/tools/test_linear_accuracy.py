"""The table of errors of linear layers, with small shapes: what every way to compute them must keep to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.needs import needs_compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks import linear_accuracy


@needs_compiler
def test_all_ways_are_as_exact_as_their_inputs_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_accuracy, "SHAPES", ((320, 48),))
    monkeypatch.setattr(linear_accuracy, "ROWS", (1, 33))
    table = linear_accuracy.table()
    for (kind, name), line in table.items():
        inputs_in_16_bits = kind in ("int8", "int4") and name != "AMX"
        assert all(error.largest < (1e-4 if inputs_in_16_bits else 1e-5) for error in line.sums.values()), (kind, name)
        assert line.results.largest < (1e-5 if kind == "float32" else 0.1), (kind, name)
    linear_accuracy.main([])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(table) + 2 and len({row.count("|") for row in shown}) == 1
