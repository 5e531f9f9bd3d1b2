"""Hostile checkpoints are refused with a line each, by the code that ``engine check`` and ``engine serve`` run.

All of them, with time and memory measured: ``python -m tools.attack.checkpoints``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.selection import few

from engine.assembly.assemble import configure, plan_for
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import bundled_dir
from engine.service.start_check import check_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.attack.checkpoints import Attack, Folder, attacks, copied  # noqa: E402

ATTACKS = {attack.name: attack for attack in attacks() if not attack.is_large}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(bundled_dir(), tmp_path_factory.mktemp("bundled") / "model")


@pytest.fixture(scope="session")
def check() -> Callable[[Path], None]:
    """What ``engine check`` does with a folder, without composing the configuration anew each time."""
    configured = configure(["device=cpu"])

    def checked(folder: Path) -> None:
        settings = configured.composed.settings
        mine = replace(settings, model=replace(settings.model, path=str(folder)))
        check_files(plan_for(replace(configured, composed=replace(configured.composed, settings=mine))))

    return checked


def made(attack: Attack, model: Path, folder: Path) -> Path:
    copy = Folder(model, folder / "model")
    attack.make(copy)
    return copy.path


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.code == 0])
def test_what_is_harmless_goes_on_working(
    name: str, model: Path, check: Callable[[Path], None], tmp_path: Path
) -> None:
    check(made(ATTACKS[name], model, tmp_path))


@few(100)
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.code == 2])
def test_a_hostile_checkpoint_is_refused_with_a_line_for_each_problem(
    name: str, model: Path, check: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = made(ATTACKS[name], model, tmp_path)
    with pytest.raises(AssemblyError) as raised:
        check(folder)
    assert 0 < len(raised.value.problems) <= 20
    assert all(problem.isprintable() and len(problem) < 2000 for problem in raised.value.problems)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("check",), "model.safetensors: a header of 2**63 bytes"),
        (("serve", "server.port=0"), "tokenizer: a charsmap of 4 GB"),
    ],
)
def test_the_commands_end_with_2_and_one_line(words: tuple[str, ...], name: str, model: Path, tmp_path: Path) -> None:
    folder = made(ATTACKS[name], model, tmp_path)
    command = [sys.executable, "-m", "engine.cli.main", *words, f"model.path={folder}", "device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("engine: ")
