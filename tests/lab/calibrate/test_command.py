"""The help of ``engine calibrate``, and what it refuses."""

from __future__ import annotations

import pytest

from engine.cli.main import main
from engine_lab.calibrate.command import NOTES


def test_its_help_says_what_reads_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--help"]) == 0
    assert "gateway.cascade.NAME.table=FILE reads it" in NOTES and NOTES.splitlines()[0] in capsys.readouterr().out


def test_without_models_it_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "http://127.0.0.1:1"]) == 2
    assert "--small" in capsys.readouterr().err
