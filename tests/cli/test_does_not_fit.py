"""What does not fit into memory is refused with exit code 2 and hints, whichever way the engine is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.selection import few

from engine import LLM
from engine.assembly.errors import AssemblyError

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
