"""What does not fit into memory is refused with exit code 2 and hints, whichever way the engine is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.selection import few

from engine import LLM
from engine.assembly.errors import AssemblyError
from engine.cli.main import main

TOO_MUCH = ("device=cpu", "exporter=[]", "memory.kv_tokens=1000000000")


@few(1)
@pytest.mark.parametrize("words", [["serve", "server.port=0"], ["check", "--build"]])
def test_a_command_ends_with_the_reason_and_what_would_help(words: list[str]) -> None:
    command = [sys.executable, "-m", "engine.cli.main", *words, *TOO_MUCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "engine: bundled does not fit on this cpu device" in done.stderr
    assert "are missing" in done.stderr and "  memory.kv_tokens=" in done.stderr
    assert "Traceback" not in done.stderr and "load weights" not in done.stderr


def test_llm_raises_the_error_of_every_other_wrong_configuration() -> None:
    with pytest.raises(AssemblyError, match="does not fit on this cpu device"):
        LLM("bundled", overrides=TOO_MUCH)


def test_check_with_build_tells_what_fits() -> None:
    command = [sys.executable, "-m", "engine.cli.main", "check", "--build", "device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "every selected plugin is built; weights take" in done.stderr


def test_check_of_two_engines_gives_each_half_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    may_use = []
    for replicas in (1, 2):
        words = ["check", "--build", "device=cpu", "exporter=[]", f"fleet.replicas={replicas}"]
        assert main(words) == 0
        shown = capsys.readouterr()
        assert (
            ("fleet: 2 engines, each with" in shown.out) == ("each of 2 engines needs" in shown.err) == (replicas == 2)
        )
        number, unit = shown.err.partition("of the ")[2].split()[:2]
        may_use.append(float(number) * {"MiB": 1 / 1024, "GiB": 1.0}[unit])
    assert may_use[1] == pytest.approx(may_use[0] / 2, rel=0.25)
