"""A file for the result that cannot be written is said before anything is measured."""

import pytest

from engine.cli.main import main
from engine.contracts.command import USAGE

NOBODY = "http://127.0.0.1:1"
"""Where no server is: who asks it before it looks at its file says so."""


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--url", NOBODY, "--json"),
        ("bench-machine", "--json"),
        ("doctor", "--url", NOBODY, "--record"),
        ("doctor", "--url", NOBODY, "--verify", "--ledger"),
        ("eval", "--json"),
        ("ladder", "--json"),
        ("ladder", "--html"),
        ("plan", "--live", NOBODY, "--baseline"),
        ("simulate", "no trace", "--json"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
@pytest.mark.parametrize("file", ["nowhere/result", "folder", "/proc/no/result"])
def test_a_result_that_could_not_be_written_is_refused_before_the_run(tmp_path, capsys, words, file):
    (tmp_path / "folder").mkdir()
    assert main([*words, str(tmp_path / file)]) == USAGE
    said = capsys.readouterr().err
    assert f"{words[-1]} {tmp_path / file}: expected a file that can be written" in said and said.count("\n") == 1
