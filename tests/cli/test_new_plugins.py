"""What ``engine plugins new`` writes works at once, for every slot: its tests, ``plugins check``, and serving."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from tests.cli.installed import put_on_path, take_off_path
from tests.needs import needs

from engine.assembly.discovery import discover
from engine.cli.main import main
from engine.cli.plugins.check import trial_of
from engine.cli.plugins.named import find_offer
from engine.contracts.slots import SLOTS

SCRIPT = """
import json, os, sys
import pytest
from pathlib import Path

import msgspec

pytest.main(["-q", "-c", "pytest.ini", "--rootdir=.", "-p", "no:cacheprovider", "--junitxml=tests.xml", *sys.argv[1:]])

from engine import LLM
from engine.assembly.bind import bind_api
from engine.testing.trial import Outcome, Trial
from engine.testing import suites

checked = {}
for trial in msgspec.json.decode(Path("trials.json").read_bytes(), type=list[Trial]):
    told = checked[trial.slot] = []
    suites.run(trial, told.append)
Path("checked.json").write_bytes(msgspec.json.encode(checked))

tokens = {}
for name, overrides in json.loads(Path("overrides.json").read_text()).items():
    llm = LLM("bundled", overrides=["device=cpu", "model.dtype=float32", "execution=eager", *overrides])
    (done,) = llm.generate(["class Counter(dict):\\n    def"], max_tokens=24, temperature=0)
    parts = bind_api(llm.plan)
    tokens[name] = [done.tokens, [type(part).__name__ for part in (parts.router, *parts.exporters)]]
    llm.close()
Path("tokens.json").write_text(json.dumps(tokens))
"""

PACKAGE_TEST = "test_the_tests_of_a_new_package_pass_at_once"
SUITE_TEST = "test_a_new_plugin_passes_the_suite_that_check_makes_for_it"


def slots(*quick: str) -> list[Any]:
    """All of them; the default run has these, whose suites are short."""
    return [pytest.param(slot, marks=() if slot in quick else pytest.mark.slow) for slot in SLOTS]


def name_of(slot: str) -> str:
    return f"mine_for_{slot}"


def folder_of(slot: str, packages: Path) -> Path:
    return packages / f"engine-{name_of(slot).replace('_', '-')}"


def selected(slot: str) -> str:
    beside = "host," if slot == "kv_store" else ""
    return f"{slot}=[{beside}{name_of(slot)}]" if SLOTS[slot].many else f"{slot}={name_of(slot)}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a new package for each slot, all of them on the path as if installed."""
    parent = tmp_path_factory.mktemp("packages")
    for slot in SLOTS:
        assert main(["plugins", "new", slot, name_of(slot), "--dir", str(parent)]) == 0
    folders = sorted(parent.iterdir())
    put_on_path(*folders)
    yield parent
    take_off_path(*folders)


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process runs the tests of packages, the suites as ``check`` does, both of slots that tests of this run ask
    for, and an engine of all plugins."""
    folder = tmp_path_factory.mktemp("ran")
    discovered = discover()
    asking = [item for item in request.session.items if item.path == request.path and "ran" in item.fixturenames]
    tested = {
        name: [item.callspec.params["slot"] for item in asking if item.originalname == name]
        for name in (PACKAGE_TEST, SUITE_TEST)
    }
    trials = [trial_of(find_offer(f"{slot}={name_of(slot)}", discovered), [], [], []) for slot in tested[SUITE_TEST]]
    (folder / "trials.json").write_bytes(msgspec.json.encode(trials))
    chosen = {  # stores need an allocator that caches, which the new one does not
        "plain": [selected("kv_store")],
        "ours": [selected(slot) for slot in SLOTS if slot != "kv_store"],
    }
    (folder / "overrides.json").write_text(json.dumps(chosen))
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
    folders = [str(folder_of(slot, packages)) for slot in tested[PACKAGE_TEST]]
    command = [sys.executable, "-c", SCRIPT, *folders]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("slot", slots("drafter"))
def test_the_tests_of_a_new_package_pass_at_once(slot: str, ran: Path) -> None:
    cases = ElementTree.parse(ran / "tests.xml").iter("testcase")
    mine = [case for case in cases if f"test_engine_{name_of(slot)}" in case.attrib["classname"]]
    assert len(mine) >= 3
    assert [case.attrib["name"] for case in mine if len(case)] == []


@pytest.mark.parametrize("slot", slots("drafter", "router"))
def test_a_new_plugin_passes_the_suite_that_check_makes_for_it(slot: str, ran: Path) -> None:
    lines = json.loads((ran / "checked.json").read_text())[slot]
    assert [line["type"] for line in (lines[0], lines[-1])] == ["suite", "ended"]
    suite = f"engine.testing.{slot}." if SLOTS[slot].suite else "engine.testing.subject.ContractSuite"
    assert any(name.startswith(suite) for name in lines[0]["suites"])
    outcomes = [line for line in lines if line["type"] == "outcome"]
    assert [line for line in outcomes if line["outcome"] == "failed"] == []
    assert any(line["outcome"] == "passed" for line in outcomes)
    skips = [line["why"] for line in outcomes if line["outcome"] == "skipped"]
    assert slot == "kv_store" or skips == []  # of the tests of stores, some are for memory alone


def test_an_engine_of_new_plugins_alone_serves_the_same_tokens(ran: Path) -> None:
    tokens = json.loads((ran / "tokens.json").read_text())
    assert tokens["ours"][0] == tokens["plain"][0] and len(tokens["ours"][0]) == 24
    assert tokens["ours"][1] == ["MineForRouterRouter", "MineForExporterExporter"]
    in_api = {name for name, slot in SLOTS.items() if slot.in_api}
    assert in_api == {"router", "exporter", "embedder"}, "an embedder is built for a router that asks for it"


@pytest.mark.parametrize("slot", SLOTS)
def test_nothing_of_the_template_shows(slot: str, packages: Path) -> None:
    folder = folder_of(slot, packages)
    texts = {file.name: file.read_text() for file in folder.rglob("*") if file.suffix in (".py", ".toml", ".md")}
    module = f"engine_{name_of(slot)}.py"
    assert set(texts) == {module, f"test_{module}", "pyproject.toml", "README.md"}
    assert [name for name, text in texts.items() if "templates" in text or re.search("@[A-Z]+@", text)] == []


def test_a_new_plugin_is_listed_and_shown_with_its_own_words(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "--json"]) == 0
    listed = {(row["slot"], row["name"]) for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert {(slot, name_of(slot)) for slot in SLOTS} <= listed
    assert main(["plugins", "show", name_of("router"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["origin"] == "engine-mine-for-router 0.1.0"
    assert shown["file"] == str(packages / "engine-mine-for-router" / "engine_mine_for_router.py")
    (key,) = shown["configuration"]
    assert (key["key"], key["type"], key["default"]) == ("router.retry_after_s", "int", 5)
    assert key["doc"] == "How long a client is asked to wait while no engine is alive."
    assert (shown["reasons_against"], shown["select"]) == ([], "engine serve router=mine_for_router")


def _no_hatchling() -> str:
    return "" if find_spec("hatchling") and find_spec("editables") else "no hatchling and editables to build a package"


@needs(_no_hatchling)
def test_pip_installs_a_new_package_and_its_commands_work(tmp_path: Path) -> None:
    """The way of its README, into a folder of its own."""
    assert main(["plugins", "new", "router", "by_pip", "--dir", str(tmp_path)]) == 0
    site_packages, package = tmp_path / "site", tmp_path / "engine-by-pip"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(site_packages), "-e", str(package)], check=True, timeout=120)
    (link,) = site_packages.glob("*.pth")
    assert link.read_text().strip() == str(package)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site_packages), str(package), *sys.path])}
    command = [sys.executable, "-m", "engine.cli.main", "plugins", "check", "by_pip"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "router=by_pip of engine-by-pip 0.1.0: " in done.stdout, done.stdout + done.stderr
