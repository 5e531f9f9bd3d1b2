"""Subcommands that plugins offer."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from engine.assembly.discovery import CommandOffer, Discovered, Origin, PluginFailure, discover
from engine.cli import commands as module
from engine.cli.commands import CORE, commands
from engine.cli.main import main
from engine.contracts.command import Command, CommandProvider
from engine.contracts.config import PluginSettings

REPLAY = CommandProvider("replay", "engine_mine:REPLAY", "replay recorded requests")


def offer(dist: str, provider: CommandProvider = REPLAY) -> CommandOffer:
    return CommandOffer(provider, Origin(dist, "0.3.0", "main"))


@pytest.fixture
def installed(monkeypatch):
    """``installed(*offers, failures=())``: what is discovered; ``engine_mine`` has the commands."""
    mine = ModuleType("engine_mine")
    mine.REPLAY = Command(
        "Replay recorded requests.",
        lambda flags, overrides: print(f"replays {flags.file} with {overrides}") or 7,
        lambda parser: parser.add_argument("--file"),
    )
    mine.NO_COMMAND = 3
    monkeypatch.setitem(sys.modules, "engine_mine", mine)

    def install(*offers: CommandOffer, failures: tuple[PluginFailure, ...] = ()) -> None:
        monkeypatch.setattr(module, "discover", lambda: Discovered(commands=offers, failures=failures))

    return install


def test_a_plugins_command_gets_its_flags_and_overrides_and_its_exit_code_counts(installed, capsys):
    installed(offer("engine-mine"))
    assert main(["replay", "drafter=none", "--file", "a.json"]) == 7
    assert capsys.readouterr().out == "replays a.json with ['drafter=none']\n"
    assert main(["replay", "--fil", "a"]) == 2
    assert "no such flag --fil; did you mean '--file'" in capsys.readouterr().err


def test_a_name_that_two_plugins_offer_is_called_with_its_distribution(installed, capsys):
    installed(offer("engine-a"), offer("engine-b"))
    assert main(["replay"]) == 2
    assert "several plugins offer the command 'replay': engine-a:replay, engine-b:replay" in capsys.readouterr().err
    assert main(["engine-b:replay", "--file", "x"]) == 7


def test_no_plugin_takes_a_command_of_the_core():
    taken = offer("engine-mine", CommandProvider("serve", "engine_mine:REPLAY", "other"))
    known = commands(Discovered(commands=(taken,)))
    assert known["serve"] is CORE[0] and known["engine-mine:serve"] is taken.provider


def test_an_unknown_command_names_the_nearest_and_the_plugins_that_failed(installed, capsys):
    installed(offer("engine-mine"), failures=(PluginFailure(Origin("engine-bad", "0.1", "main"), "import", "oops"),))
    assert main(["repaly"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean 'replay'" in shown and "engine-bad 0.1 failed (import): oops" in shown


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("engine_nowhere:REPLAY", "ModuleNotFoundError: No module named 'engine_nowhere'"),
        ("engine_mine:MISSING", "AttributeError: "),
        ("engine_mine:NO_COMMAND", "engine_mine:NO_COMMAND is a int, expected a Command"),
    ],
)
def test_a_command_that_cannot_be_loaded_is_one_message(factory, expected, installed, capsys):
    installed(offer("engine-mine", CommandProvider("replay", factory, "")))
    assert main(["replay"]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and "Traceback" not in shown and len(shown.splitlines()) == 1


def test_the_load_generator_is_a_plugin():
    found = discover(PluginSettings(third_party=False))
    assert [offered.qualified for offered in found.commands] == ["engine:bench"]
