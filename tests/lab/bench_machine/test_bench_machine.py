"""``engine bench-machine``: figures of every way to multiply, as a table and as JSON."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tests.needs import needs_compiler

from engine import native
from engine.cli.main import main
from engine.contracts.command import USAGE
from engine.kernels.cpu.linear import float_linear
from engine_lab.bench_machine import machine
from engine_lab.bench_machine import main as shown

HUGE = Path("/sys/kernel/mm/transparent_hugepage")


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
    assert all(way["is_chosen"] for way in figures["ways"])
    assert figures["missing"] == "no C++ compiler found" and figures["read_gb_s"] > 0


def test_load_of_others_is_what_these_cpus_did_less_what_this_process_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "process_s", lambda pid: 4.0)
    monkeypatch.setattr(machine, "cpu_times", lambda cpus: (16.0, 4.0))
    assert machine._others_s({0, 2}) == 16.0, "what the hypervisor took counts"
    monkeypatch.setattr(machine, "cpu_times", lambda cpus: None)
    assert math.isnan(machine._others_s({0, 9})), "the system does not say"


@pytest.mark.parametrize(("others", "words"), [(0.02, "0.02 CPUs"), (0.9, "rates may be too low"), (None, "unknown")])
def test_load_of_others_is_shown_with_what_it_means(
    others: float | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = machine.Machine("a processor", 2, 2, {"L1": "48K", "L3": "491520K"}, "", "2", 1.0, 1.0, (), others=others)
    monkeypatch.setattr(shown, "measure", lambda threads: found)
    assert shown.run(None, None) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert words in " ".join(lines) and "L1 48 KiB, L3 480 MiB" in " ".join(lines)


@pytest.mark.skipif(not HUGE.exists(), reason="a kernel without huge pages")
def test_bandwidth_is_read_from_private_memory_that_asks_for_huge_pages() -> None:
    """The kernel gives shared memory small pages by default, which are read more slowly than weights are."""
    memory = machine.huge_pages(4 << 20)
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    ranges = {mapping: [int(end, 16) for end in mapping.split(" ", 1)[0].split("-")] for mapping in mappings}
    (found,) = (text for text, (start, end) in ranges.items() if start <= memory.data_ptr() < end)
    flags = re.findall(r"^VmFlags: (.*)$", found, re.MULTILINE)[0].split()
    assert "hg" in flags and "sh" not in flags


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    machine.measure(before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("words", [["--threads", "0"], ["--threads", "two"], ["--threads", "1000000"], ["x=1"]])
def test_wrong_usage_is_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-machine", *words]) == USAGE
    told = capsys.readouterr()
    assert words[-1] in told.out + told.err
