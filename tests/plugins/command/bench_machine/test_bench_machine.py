"""``engine bench-machine``: figures of every way to multiply, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.needs import needs_compiler

from engine import native
from engine.cli.main import main
from engine_plugins.command.bench_machine import machine
from engine_plugins.quantizer import float_linear


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "OUTPUTS", 64)
    monkeypatch.setattr(machine, "INPUTS", 64)
    monkeypatch.setattr(machine, "ROUNDS", 1)


@needs_compiler
def test_the_table_shows_what_the_engine_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench-machine", "--threads", "1", "--json", str(tmp_path / "machine.json")]) == 0
    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "machine.json").read_text())
    assert figures["schema"] == "engine-bench-machine/1" and figures["threads"] == 1
    assert figures["read_gb_s"] > 0 and figures["read_one_thread_gb_s"] > 0
    ways = {(way["weights"], way["instructions"]): way for way in figures["ways"]}
    assert all(rate > 0 for way in ways.values() for rate in way["gflops"].values())
    best = float_linear.best_instructions(torch.bfloat16)
    assert ways["bfloat16", best]["is_chosen"] and not ways["bfloat16", "torch"]["is_chosen"]
    assert "takes it" in shown and "read bandwidth" in shown and best in shown


def test_without_a_compiler_torchs_rates_are_there_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: "no C++ compiler found")
    assert main(["bench-machine", "--threads", "1", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {way["instructions"] for way in figures["ways"]} == {"torch"}
    assert figures["missing"] == "no C++ compiler found" and figures["read_gb_s"] > 0


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    machine.measure(before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("words", "code"), [(["--threads", "0"], 2), (["--threads", "two"], 2), (["x=1"], 2)])
def test_wrong_usage_is_told(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-machine", *words]) == code
    told = capsys.readouterr()
    assert words[-1] in told.out + told.err


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench-machine", "--threads", "1", "--json", str(tmp_path / "none" / "x.json")]) == 1
    assert "none/x.json" in capsys.readouterr().err
