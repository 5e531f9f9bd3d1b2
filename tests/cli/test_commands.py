"""Subcommands that plugins offer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine.assembly.discovery import CommandOffer, Discovered, Origin, PluginFailure, discover
from engine.cli import commands as module
from engine.cli import complete
from engine.cli import main as cli
from engine.cli.commands import commands, find
from engine.cli.main import main
from engine.contracts.command import Command, CommandProvider
from engine.contracts.config import PluginSettings
from engine.plugin_guard.calls import PluginError

GUIDE = Path(__file__).parents[2] / "docs" / "plugins.md"
REPLAY = CommandProvider("replay", "engine_mine:REPLAY", "replay recorded requests")


def offer(dist: str, provider: CommandProvider = REPLAY) -> CommandOffer:
    return CommandOffer(provider, Origin(dist, "0.3.0", "main"))


def misled(*_):
    raise PluginError("scheduler=mine: plan() raised KeyError")


def interrupt(flags: object, overrides: object) -> int:
    raise KeyboardInterrupt


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
    mine.BROKEN = Command("Fails.", lambda flags, overrides: 1 // 0)
    mine.MISLED = Command("Fails by a plugin.", misled)
    mine.NO_CODE = Command("Returns nothing.", lambda flags, overrides: None)
    mine.STOPS = Command("Stops.", lambda flags, overrides: sys.exit("in its own words"))
    mine.INTERRUPTED = Command("Is interrupted.", interrupt)
    mine.TAKEN_FLAG = Command("Takes a flag.", lambda *_: 0, lambda parser: parser.add_argument("--config-dir"))
    monkeypatch.setitem(sys.modules, "engine_mine", mine)

    def install(*offers: CommandOffer, failures: tuple[PluginFailure, ...] = ()) -> None:
        monkeypatch.setattr(module, "discover", lambda settings=None: Discovered(commands=offers, failures=failures))

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
    shown = capsys.readouterr().err
    assert "several packages offer the command 'replay': say which of engine-a:replay, engine-b:replay" in shown
    assert main(["engine-b:replay", "--file", "x"]) == 7
    assert main(["engine-b:replay", "--help"]) == 0
    assert "usage: engine engine-b:replay" in capsys.readouterr().out


def test_a_plugins_command_may_always_be_called_with_its_distribution(installed):
    installed(offer("engine-mine"))
    assert main(["engine-mine:replay"]) == main(["replay"]) == 7


@pytest.mark.parametrize("name", ["serve", "help", "complete", "bench"])
def test_no_plugin_takes_a_command_of_the_engine(name):
    taken = offer("engine-mine", CommandProvider(name, "engine_mine:REPLAY", "other"))
    own = discover(PluginSettings(third_party=False)).commands
    known = commands(Discovered(commands=(taken, *own)))
    assert known[f"engine-mine:{name}"] is taken and known.get(name) is not taken
    if name != "help":
        assert find(name).origin.dist == "engine"


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
        ("engine_mine:NO_CODE", "command replay returned None, expected an exit code"),
        ("engine_mine:TAKEN_FLAG", "conflicting option string: --config-dir"),
    ],
)
def test_a_command_that_cannot_be_used_is_one_message(factory, expected, installed, capsys):
    installed(offer("engine-mine", CommandProvider("replay", factory, "")))
    assert main(["replay"]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and "Traceback" not in shown and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("attribute", "code", "expected"),
    [
        ("BROKEN", 1, "integer division or modulo by zero\nengine: command engine-mine:replay failed"),
        ("MISLED", 1, "engine: command engine-mine:replay failed: scheduler=mine: plan() raised KeyError"),
        ("STOPS", 1, "in its own words"),
        ("INTERRUPTED", 130, ""),
    ],
)
def test_how_a_command_ends_is_seen(attribute, code, expected, installed, capsys):
    installed(offer("engine-mine", CommandProvider("replay", f"engine_mine:{attribute}", "")))
    assert main(["replay"]) == code
    assert expected in capsys.readouterr().err


def test_completion_is_silent_about_a_command_that_cannot_be_used(installed, monkeypatch, capsys):
    installed(offer("engine-mine", CommandProvider("replay", "engine_nowhere:REPLAY", "")))
    monkeypatch.setattr(complete, "discover", module.discover)
    assert complete.candidates("engine rep") == ["replay"] and complete.candidates("engine replay --") == []
    assert capsys.readouterr().err == ""


def test_the_help_says_that_plugins_failed(monkeypatch, capsys):
    failed = Discovered(failures=(PluginFailure(Origin("engine-bad", "0.1", "main"), "import", "oops"),))
    monkeypatch.setattr(cli, "discover", lambda: failed)
    assert main([]) == 0
    assert "1 failures of plugins: 'engine plugins'" in capsys.readouterr().out


def test_the_command_of_the_guide_works_as_printed(installed, monkeypatch, capsys):
    (code,) = (part for part in GUIDE.read_text().split("```python\n") if part.startswith('"""Counts'))
    example = ModuleType("engine_count")
    monkeypatch.setitem(sys.modules, example.__name__, example)
    exec(compile(code.split("```")[0], str(GUIDE), "exec"), example.__dict__)  # noqa: S102 - the page is ours
    installed(*(offer("engine-count", provider) for provider in example.engine_command()))
    assert main(["count", "--prompt", "What is a list?", "drafter=none", "device=cpu", "exporter=[]"]) == 0
    assert capsys.readouterr().out.endswith(" tokens\n")


def test_what_measures_and_watches_an_engine_is_a_plugin():
    found = discover(PluginSettings(third_party=False))
    offered = {command.qualified for command in found.commands}
    assert {f"engine:{name}" for name in ("bench", "bench-machine", "eval", "top", "chat")} <= offered
