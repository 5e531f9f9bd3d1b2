"""What a long command is doing."""

from __future__ import annotations

import pytest

from engine_lab.shared.progress import status_line


def test_each_step_is_a_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with status_line() as say:
        say("pair 1 of 2")
        assert capsys.readouterr().err == "pair 1 of 2\n"
