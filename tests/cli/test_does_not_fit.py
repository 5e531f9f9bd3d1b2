"""What does not fit into memory is refused with exit code 2 and hints, whichever way the engine is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import LLM
from engine.assembly.errors import AssemblyError
from engine.cli.main import main

TOO_MUCH = ("device=cpu", "exporter=[]", "memory.kv_tokens=1000000000")


def assert_told(code: int, said: str) -> None:
    assert code == 2, said
    assert "engine: bundled does not fit on this cpu device" in said
    assert "are missing" in said and "  memory.kv_tokens=" in said
    assert "Traceback" not in said and "load weights" not in said


@pytest.mark.slow
def test_a_server_ends_with_the_reason_and_what_would_help() -> None:
    command = [sys.executable, "-m", "engine.cli.main", "serve", "server.port=0", *TOO_MUCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert_told(done.returncode, done.stderr)


def test_check_with_build_ends_with_the_reason_and_what_would_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert_told(main(["check", "--build", *TOO_MUCH]), capfd.readouterr().err)


def test_llm_raises_the_error_of_every_other_wrong_configuration() -> None:
    with pytest.raises(AssemblyError, match="does not fit on this cpu device"):
        LLM("bundled", overrides=TOO_MUCH)


def test_check_with_build_tells_what_fits(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--build", "device=cpu"]) == 0
    assert "every selected plugin is built; weights take" in capfd.readouterr().err


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
