"""The table of slots is where a slot is declared: an entry is all that a new one needs in the core."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from engine.assembly.compose import conf_dir
from engine.contracts.slots import SLOTS

CONTRACT = """
from typing import Protocol, runtime_checkable


@runtime_checkable
class Greeter(Protocol):
    def greet(self, name: str) -> str: ...


def suite_for(subject):
    from engine.testing.subject import filled

    class GreeterConformance:
        def test_the_name_is_said(self):
            assert "you" in subject.build().greet("you")

    return filled(subject, [GreeterConformance])
"""
PLUGIN = """
from dataclasses import dataclass

from engine.contracts.config import SlotConfig
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class PoliteConfig(SlotConfig):
    word: str = "Hello"


class Polite:
    def __init__(self, config, context):
        self.word = config.word

    def greet(self, name):
        return f"{self.word} {name}"


@hookimpl
def engine_greeter():
    return [Provider("polite", "engine_polite:Polite", config=PoliteConfig, doc="Greets.")]
"""
PROJECT = """
[project]
name = "engine-polite"
version = "1"
[project.entry-points."engine.plugins.v1"]
polite = "engine_polite"
"""
SCRIPT = """
import json, sys
from pathlib import Path

from engine.contracts import slots

import greeter

slots.SLOTS["greeter"] = slots.Slot("greeter", greeter.Greeter, suite="greeter:suite_for")

from engine.assembly.compose import catalogue, composer

catalogue.conf_dir = composer.conf_dir = lambda: Path("conf").resolve()

from tests.cli.installed import put_on_path

put_on_path(Path("package").resolve())

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.discovery import discover
from engine.cli.main import main
from engine.cli.plugins.check import trial_of
from engine.cli.plugins.named import find_offer
from engine.testing.suites import suite_of

assert main(["plugins", "--json"]) == 0
plan = assemble(["model.path=bundled", "device=cpu", "greeter.word=Hi"])
(built,) = bind(plan).others["greeter"]
discovered = discover()
suite = suite_of(trial_of(find_offer("greeter=polite", discovered), [], [], []))
suite().test_the_name_is_said()
print(json.dumps([plan.choice("greeter").name, built.greet("you"), [str(one) for one in discovered.failures]]))
"""


def test_a_new_slot_is_an_entry_a_contract_and_a_suite(tmp_path: Path) -> None:
    """The throw-away slot touches the table, a contract with its suite, and the option that is its default."""
    (tmp_path / "greeter.py").write_text(CONTRACT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "engine_polite.py").write_text(PLUGIN)
    (tmp_path / "package" / "pyproject.toml").write_text(PROJECT)
    shutil.copytree(conf_dir(), tmp_path / "conf")
    config = tmp_path / "conf" / "config.yaml"
    config.write_text(config.read_text().replace("  - _self_", "  - greeter: polite\n  - _self_"))
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    program = f"import sys; sys.path[:0] = {paths!r}\n{textwrap.dedent(SCRIPT)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.strip().splitlines()
    assert json.loads(last) == ["polite", "Hi you", []]
    offered = {(row["slot"], row["name"]) for row in json.loads("\n".join(listed))["plugins"]}
    assert ("greeter", "polite") in offered and ("drafter", "eagle3") in offered


def test_every_slot_names_a_protocol_and_a_function_that_makes_its_suite() -> None:
    from engine.assembly import values

    assert [name for name, slot in SLOTS.items() if name != slot.name or not callable(slot.protocol)] == []
    assert [name for name, slot in SLOTS.items() if slot.suite and not callable(values.load(slot.suite))] == []
