"""``engine batch run``, as far as it goes without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli import batch
from engine.cli.main import main
from engine.contracts.command import USAGE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "FILE"),
        (["run", "{there}"], "-o"),
        (["walk", "{there}", "-o", "x"], "walk"),
        (["run", "{gone}", "-o", "x"], "there is no such file"),
        (["run", "{there}", "-o", "{gone}/x"], "there is no folder"),
        (["run", "{there}", "-o", "{there}"], "there is such a file; remove it"),
        (["run", "{there}", "-o", "{gone}", "drafter=nono"], "nono"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "in").touch()
    places = {"there": tmp_path / "in", "gone": tmp_path / "gone"}
    assert main(["batch", *(word.format(**places) for word in words)]) == USAGE
    assert said in capsys.readouterr().err


def test_its_help_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "--help"]) == 0
    assert "goes on from there" in capsys.readouterr().out and batch.COMMAND.takes_overrides
