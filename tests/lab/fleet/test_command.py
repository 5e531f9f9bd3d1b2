"""The help of ``engine fleet``, and what it refuses."""

from engine.cli.main import main
from engine_lab.fleet.words import WANTS


def test_its_help_has_every_form(capsys):
    assert main(["fleet", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"engine fleet {action} URL" in shown for action in WANTS if action != "show")


def test_words_that_make_no_sense_are_wrong_usage(capsys):
    assert main(["fleet", "stop"]) == 2
    assert capsys.readouterr().err.startswith("engine fleet: unexpected 'stop'")
    assert main(["fleet", "restart", "--no-such-flag"]) == 2
