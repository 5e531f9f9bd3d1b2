"""``tools/gpu_check``: a dry run of the whole tool on a CPU, and that it can say no."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from engine.contracts.events import StepEvent

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_check"
sys.path.append(str(ROOT / "tools"))

from gpu_check import (  # noqa: E402
    attention_speed,
    best_known,
    command,
    conductor,
    dependent_launch,
    drafting,
    floors,
    kernel_tests,
    laws,
    machine_code,
    mixed,
    mixtures,
    registry,
    report,
    resume,
    standalone,
    wheels,
)
from gpu_check.conductor import Outcome, conduct, run_section  # noqa: E402
from gpu_check.draft_head import HeadShape  # noqa: E402
from gpu_check.engine_run import DecodeStep  # noqa: E402
from gpu_check.section import CARD, FACTS, Context, Row, Section, read_rows, rows_file, time_row  # noqa: E402
from gpu_check.shapes import SHAPES, TINY  # noqa: E402

RATES = registry.BY_NAME["rates"]


Ran = tuple[int, str, dict[str, Any]]
"""Exit code, output and JSON report of the tool."""
ASKED = ("attention", "kernel_tests", "laws_float32", "speed_1b", "speed_8b", "serve", "drafting")
"""Sections of every kind: interpreted kernels, engines, measurements, another program, and two that need a GPU."""


def run_dry(folder: Path, *asked: str) -> Ran:
    """``asked``: sections by name; all that are not asked for by name alone if there is none."""
    only = ["--only", *asked] if asked else []
    command = [sys.executable, str(TOOL), "--dry-run", *only, "--output", str(folder), "--logs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    (file,) = folder.glob("*.json")
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text())


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_dry(tmp_path_factory.mktemp("dry_run"), *ASKED)


def assert_all_passed(ran: Ran, sections: Sequence[Section]) -> None:
    code, output, found = ran
    states = {name: (section["status"], section["reason"]) for name, section in found["sections"].items()}
    assert code == 0 and found["passed"], output
    assert states == {section.name: ("ok", "") for section in sections}, output
    assert all(section["rows"] for section in found["sections"].values())


@pytest.mark.slow
def test_chains_of_products_are_run_dry_with_other_tiles(tmp_path: Path) -> None:
    assert_all_passed(run_dry(tmp_path, "tiles"), [registry.BY_NAME["tiles"]])


@pytest.mark.slow
def test_a_dry_run_runs_every_section_that_needs_no_gpu_and_passes(tmp_path: Path) -> None:
    assert_all_passed(run_dry(tmp_path), [section for section in registry.SECTIONS if not section.gpu_only])


@pytest.mark.slow
def test_a_dry_run_of_sections_asked_for_runs_those_that_need_no_gpu_and_passes(dry_run: Ran) -> None:
    picked, left_out = registry.chosen(list(ASKED), dry_run=True)
    assert {section.name for section in picked} == {"rates", "prepare", *ASKED} - {s.name for s in left_out}
    assert_all_passed(dry_run, picked)


@pytest.mark.slow
def test_what_a_dry_run_leaves_out_is_named_as_not_measured(dry_run: Ran) -> None:
    _, output, found = dry_run
    left_out = [name for name in ASKED if registry.BY_NAME[name].gpu_only]
    assert set(found["not_measured"]) == set(left_out) and left_out
    lines = [line for line in output.splitlines() if "not measured" in line]
    assert all(any(name in line for line in lines) for name in left_out), output


@pytest.mark.slow
def test_a_dry_run_measures_the_engine_and_every_baseline_on_the_same_model(dry_run: Ran) -> None:
    rows = {row["metric"]: row for row in dry_run[2]["sections"]["speed_1b"]["rows"]}
    assert rows["1b: first tokens as plain torch's"]["measured"] == "16 of 16"
    for name in ("torch eager", "torch.compile + CUDA graph", "transformers generate"):
        assert rows[f"1b: batch 1, {name} / engine"]["measured"] > 0
    decode = rows["1b: decode, batch 1"]
    assert decode["share"] == pytest.approx(decode["limit"] / decode["measured"])
    assert decode["floor"] == decode["limit"] and decode["best_known"] is None  # no data sheet
    assert {"1b: TTFT, 32 tokens", "1b: host gap, batch 2", "1b: memory ledger / real peak"} <= rows.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_exit_code_is_2_and_nothing_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--output", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "finds no CUDA device" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_section_that_fails_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    sections = [dataclasses.replace(registry.BY_NAME["start"], needs=()), RATES]  # start finds no checkpoint
    outcomes = {o.section.name: o for o in conduct(sections, tmp_path, dry_run=True, total_s=60.0, say=print)}
    assert outcomes["rates"].status == "ok" and len(outcomes["rates"].rows) == 3
    assert outcomes["start"].status == "failed" and "no such directory" in outcomes["start"].reason
    assert report.failed(outcomes.values()) and not report.failed([outcomes["rates"]])


def test_a_section_over_its_budget_is_killed_and_reported(tmp_path: Path) -> None:
    hurried = dataclasses.replace(RATES, budget_s=0.05)
    outcome = run_section(hurried, tmp_path, True, time.monotonic() + 60.0)
    assert outcome.status == "out of time" and "over its budget" in outcome.reason
    assert report.failed([outcome])
    optional = dataclasses.replace(outcome, section=dataclasses.replace(hurried, is_optional=True))
    assert not report.failed([optional])


def test_after_a_gate_that_failed_nothing_is_started(tmp_path: Path) -> None:
    gate = dataclasses.replace(RATES, is_gate=True, budget_s=0.05)
    outcomes = conduct((gate, RATES), tmp_path, dry_run=False, total_s=60.0, say=print)
    assert [(o.status, o.reason) for o in outcomes[1:]] == [("not started", "rates failed")]


def test_packages_that_the_project_requires_and_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert standalone.missing_packages() == []
    monkeypatch.setattr(standalone, "is_there", lambda name: name not in ("hydra-core", "msgspec"))
    assert standalone.missing_packages() == ["hydra-core", "msgspec"]


def test_a_section_gets_no_time_once_the_whole_run_has_none(tmp_path: Path) -> None:
    outcome = run_section(RATES, tmp_path, True, time.monotonic() - 1.0)
    assert outcome.status == "not started" and report.failed([outcome])


def test_rows_emitted_before_the_end_are_kept_and_half_written_ones_are_not(tmp_path: Path) -> None:
    context = Context(RATES, tmp_path, dry_run=True)
    context.emit(Row("whole", 1.5, "ms"))
    with rows_file(tmp_path, "rates").open("a") as file:
        file.write('{"metric": "ha')
    assert [row.metric for row in read_rows(tmp_path, "rates")] == ["whole"]


HANGING_SECTION = """
import os, sys, time
from pathlib import Path
sys.path.append({tools!r})
from gpu_check.section import Context, Row, Section

scratch = Path(sys.argv[sys.argv.index("--scratch") + 1])
context = Context(Section(sys.argv[2], "", "", 0.0), scratch, dry_run=True)
for metric in ("first", "second", "third", "fourth"):
    if context.has(metric):
        continue
    context.emit(Row(metric, os.getpid()))
    if metric == "third" and not Path({marker!r}).exists():
        Path({marker!r}).touch()
        time.sleep(120)
"""
"""Emits a row in which process it runs; the first time, it hangs in the middle."""


@pytest.fixture
def hanging_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section is :data:`HANGING_SECTION`."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING_SECTION.format(tools=str(ROOT / "tools"), marker=str(tmp_path / "was here")))
    monkeypatch.setattr(conductor, "TOOL", script)


def run_it(folder: Path, *arguments: str) -> dict[str, Any]:
    """The command in this process, of one section."""
    folder.mkdir(exist_ok=True)
    command.main("", ["--dry-run", "--only", "rates", "--output", str(folder), *arguments])
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.usefixtures("hanging_section")
def test_a_run_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    cut = run_it(tmp_path / "out", "--total", "6")
    assert cut["sections"]["rates"]["status"] == "out of time" and not cut["passed"]
    before = {row["metric"]: row["measured"] for row in cut["sections"]["rates"]["rows"]}
    assert list(before) == ["first", "second", "third"]
    whole = run_it(tmp_path / "out", "--resume")
    after = {row["metric"]: row["measured"] for row in whole["sections"]["rates"]["rows"]}
    assert list(after) == ["first", "second", "third", "fourth"] and after.items() >= before.items()
    assert after["fourth"] != before["third"]
    assert whole["passed"] and whole["when"] == cut["when"] and len(whole["resumed"]) == 1
    capsys.readouterr()
    again = run_it(tmp_path / "out", "--resume", str(next((tmp_path / "out").glob("*.json"))))
    assert again["sections"] == whole["sections"]  # nothing was left to run
    assert "rates             ok" not in capsys.readouterr().out


@pytest.mark.usefixtures("hanging_section")
def test_what_a_section_has_found_is_saved_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "SAVE_S", 0.1)
    saved: list[Outcome] = []
    conduct((RATES,), tmp_path, dry_run=True, total_s=6.0, say=print, save=lambda found: saved.extend(found))
    (last,) = [outcome for outcome in saved if outcome.status != "cut off"]
    running = saved[saved.index(last) - 1]
    assert [row.metric for row in running.rows] == ["first", "second", "third"] and running.failed


def test_a_report_of_another_card_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"device": {"name": "NVIDIA H100 80GB HBM3"}, "sections": {}}))
    assert resume.load(file, "NVIDIA H100 80GB HBM3")["sections"] == {}
    with pytest.raises(ValueError, match="the report is of 'NVIDIA H100 80GB HBM3', this device is 'NVIDIA H200'"):
        resume.load(file, "NVIDIA H200")
    file.write_text("no report")
    with pytest.raises(ValueError, match="not a report"):
        resume.load(file, "NVIDIA H200")


def test_what_is_left_brings_along_what_it_needs_and_forgets_rows_that_failed(tmp_path: Path) -> None:
    sections, _ = registry.chosen(["speed_8b"], dry_run=False)
    done = [Outcome(section, "ok", 1.0, (Row("a", 1.0),)) for section in sections]
    assert resume.still_to_run(sections, done, tmp_path) == ()
    rows = (Row("good", 1.0), Row("bad", 1.0, held=False), Row("not measured"))
    cut = [*done[:2], Outcome(sections[2], "cut off", 0.0, rows)]
    left = resume.still_to_run(sections, cut, tmp_path)
    assert [section.name for section in left] == ["rates", "prepare", "speed_8b"]
    assert [row.metric for row in read_rows(tmp_path, "speed_8b")] == ["good"]
    assert read_rows(tmp_path, "rates") == ()


def test_reports_are_merged_section_by_section_in_the_order_of_the_table() -> None:
    smoke = Outcome(registry.BY_NAME["smoke"], "ok", 1.0, (Row("a", 1.0),))
    rates = Outcome(RATES, "cut off", 0.0, ())
    later = Outcome(RATES, "ok", 2.0, (Row("b", 2.0),))
    assert resume.merged([rates, smoke], [later]) == [smoke, later]
    late = Outcome(smoke.section, "not started", 0.0, ())
    assert resume.merged([smoke], [late]) == [smoke] and resume.merged([], [late]) == [late]


def test_scratch_folders_of_runs_that_were_killed_are_removed(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    mine, left = (tmp_path / f"gpu_check-{pid}-x" for pid in (os.getpid(), int(gone.stdout)))
    other = tmp_path / "gpu_check-other"
    for folder in (mine, left, other):
        folder.mkdir()
    command.remove_left_behind(tmp_path)
    assert mine.exists() and other.exists() and not left.exists()


def test_a_section_ends_with_the_run_that_started_it(tmp_path: Path) -> None:
    section = f"import sys; sys.path.append({str(ROOT / 'tools')!r})\n" + (
        "from gpu_check.conductor import end_with_parent\nimport time\nend_with_parent()\n"
        "print('ready', flush=True)\ntime.sleep(120)"
    )
    run = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, "
        + ("stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid)")
    )
    done = subprocess.run([sys.executable, "-c", run, section], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 30.0
    while (left := Path(f"/proc/{int(done.stdout)}/stat")).exists() and left.read_text().rsplit(")", 1)[1].split()[
        0
    ] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_all_budgets_together_are_under_ten_minutes() -> None:
    total = sum(max(section.budget_s for section in wave) for wave in registry.waves(registry.SECTIONS, False))
    assert total <= registry.TOTAL_S < 10 * 60


def test_what_measures_time_runs_alone_and_after_what_it_needs() -> None:
    waves = registry.waves(registry.SECTIONS, False)
    place = {section.name: i for i, wave in enumerate(waves) for section in wave}
    assert all(len(wave) == 1 for wave in waves if any(section.alone for section in wave))
    assert all(place[need] < place[s.name] for s in registry.SECTIONS for need in s.needs)


def test_only_brings_along_what_a_section_needs() -> None:
    picked, left_out = registry.chosen(["speed_8b"], dry_run=False)
    assert [section.name for section in picked] == ["rates", "prepare", "speed_8b"] and left_out == ()
    picked, left_out = registry.chosen(["speed_8b"], dry_run=True)
    assert [section.name for section in left_out] == ["speed_8b"]


def test_a_missed_speed_target_is_a_finding_and_a_failed_check_a_failure() -> None:
    slow = time_row("decode", 2.0, floors.Bars(limit=1.0), least_share=0.8)
    assert slow.held is False and slow.share == 0.5 and not slow.failed
    assert time_row("decode", 0.8, floors.Bars(limit=0.5), most_ms=0.85).held is True
    assert Row("law", held=False).failed

    def outcome(*rows: Row) -> Outcome:
        return Outcome(RATES, "ok", 1.0, rows)

    assert not report.failed([outcome(slow)]) and report.failed([outcome(slow, Row("law", held=False))])
    assert [str(report.cells(row)[-1]) for row in (slow, Row("law", held=False), Row("a", held=True))] == [
        "missed", "no", "yes"
    ]  # fmt: skip


def test_true_shapes_read_the_bytes_these_models_are_known_to_read() -> None:
    """Llama-3.2-1B and Llama-3.1-8B in bfloat16; their KV takes 32 and 128 KiB a token."""
    assert floors.decode(SHAPES["1b"], 1, 0, weight=2).read_bytes / 1e9 == pytest.approx(2.47, abs=0.01)
    assert floors.decode(SHAPES["8b"], 1, 0, weight=2).read_bytes / 1e9 == pytest.approx(15.01, abs=0.01)
    for name, kib in (("1b", 32), ("8b", 128)):
        read = [floors.decode(SHAPES[name], *rows, weight=2).read_bytes for rows in ((3, 7), (1, 0))]
        assert read[0] - read[1] == 3 * 7 * kib * 1024
    packed = floors.decode(SHAPES["8b"], 2, 5, weight=0.5, head=1, kv=1)
    assert packed.read_bytes == SHAPES["8b"].body / 2 + SHAPES["8b"].head + 2 * 5 * 64 * 1024
    prompt = floors.prefill(TINY, 1, 2.0)
    assert prompt.flops == 2 * (TINY.body + TINY.head) + 4 * TINY.num_attention_heads * TINY.head_dim * 2
    assert prompt.read_bytes == 2 * (TINY.body + TINY.head)


def test_a_head_of_the_public_sizes_reads_the_bytes_it_is_known_to_read() -> None:
    """243 million weights of the layer, 131 million of 32,000 tokens: 0.75 GB a draft in bfloat16."""
    head = HeadShape(SHAPES["8b"])
    assert (head.layer / 1e6, head.lm_head / 1e6) == pytest.approx((243.3, 131.1), abs=0.1)
    read = [floors.drafting(head, drafts, 2.0).read_bytes for drafts in (1, 3, 4)]
    assert (read[2] - read[1]) / 1e9 == pytest.approx(0.75, abs=0.01)
    assert read[0] == 2 * (head.layer + 3 * 4096**2 + head.lm_head)
    assert head.aux_layers == (1, 15, 28)


def test_a_head_that_only_syncs_its_kv_reads_what_its_keys_are_made_with() -> None:
    """50 million weights that take in three hidden states, and as many of queries, keys and values."""
    assert floors.drafting(HeadShape(SHAPES["8b"]), 0, 2.0).read_bytes / 1e9 == pytest.approx(0.2013, abs=1e-4)


def test_work_takes_as_long_as_reading_or_multiplying_by_the_rate_of_its_operands() -> None:
    rates = {"read_gb_s": 1000.0, "gemm_tflop_s": 100.0, "fp8_tflop_s": 200.0}
    assert floors.Work(2e9, 1e11).ms(rates) == pytest.approx(2.0)
    assert floors.Work(1e9, 1e12).ms(rates) == pytest.approx(10.0)
    assert floors.Work(1e9, 1e12, "fp8").ms(rates) == pytest.approx(5.0)
    assert floors.Work(1e9, 1e12, "int8").ms(rates) == pytest.approx(10.0)  # unknown: that of 16 bits


def test_floors_are_those_of_the_card_and_limits_those_of_the_run(tmp_path: Path) -> None:
    """1B in bfloat16 on an H200: 0.515 ms by its data sheet."""
    context = Context(registry.BY_NAME["serve"], tmp_path, dry_run=False)
    step = floors.decode(SHAPES["1b"], 1, 0, weight=2)
    assert context.bars(step) == floors.Bars(None, None)
    (tmp_path / FACTS).write_text(json.dumps({"read_gb_s": 2471.0, "gemm_tflop_s": 700.0}))
    assert context.bars(step).floor == context.bars(step).limit == pytest.approx(1.0, abs=1e-3)
    (tmp_path / CARD).write_text("H200")
    assert context.bars(step).floor == pytest.approx(0.515, abs=1e-3)
    assert context.bars(step).limit == pytest.approx(1.0, abs=1e-3)


def test_every_card_with_a_driver_name_has_a_data_sheet() -> None:
    for card in floors.DATA_SHEETS.values():
        assert {"read_gb_s", "copy_gb_s", "gemm_tflop_s"} <= floors.sheet_rates(card).keys()
    assert floors.sheet_rates("") == {}


def test_a_row_is_handed_back_with_the_best_that_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CARD).write_text("H200")
    context = Context(RATES, tmp_path, dry_run=False)
    context.emit(time_row("1b: decode, batch 1", 0.9, floors.Bars(0.6, 0.5)))
    context.emit(time_row("attention of a layer, prefill 512", 1.0, floors.Bars(None, 0.3)))
    context.emit(Row("1b: engine built", 7.0, "s"))
    context.emit(Row("law", "3 of 3", target="all", held=True))
    known, shared, unknown, check = read_rows(tmp_path, "rates")
    assert known.best_known is not None and known.best_known["value"] == 0.76 and known.floor == 0.5
    assert shared.best_known is not None and shared.best_known["value"] == pytest.approx(0.4)
    assert unknown.best_known is None
    said = capsys.readouterr().err.splitlines()
    assert "floor 0.5 ms; best known 0.76 ms, Hazy" in said[0] and "(floor none; best known none)" in said[2]
    assert said[3] == "law: 3 of 3 (all)"
    assert [str(cell) for cell in report.cells(unknown)[2:4]] == ["none", "none known"]
    assert [str(cell) for cell in report.cells(check)[2:4]] == ["", ""]
    (line,) = [line for line in report.legend([Outcome(RATES, "ok", 1.0, (known,))]) if "best known, 1b" in line]
    assert "0.76 ms" in line and "megakernel" in line


RECORDED = ("nvidia-h200-2026-11-26.json", "nvidia-h200-2026-11-26-second.json")
NOT_RECORDED = (
    "serve, 1 at once: ITL p50", "8b int8: decode, batch 1", "8b bf16: batch 1, plain step",
    "Qwen3-30B-A3B shape, bf16: decode, batch 1",
    *(f"8b bf16: batch 1, 6 drafts, acceptance length {length} (simulated)" for length in drafting.LENGTHS),
)  # fmt: skip
"""Rows of sections that no report under ``tools/benchmarks`` has."""


def test_every_line_of_the_table_of_best_known_stands_beside_some_row() -> None:
    reports = [json.loads((ROOT / "tools" / "benchmarks" / name).read_text()) for name in RECORDED]
    rows = {row["metric"] for found in reports for part in found["sections"].values() for row in part["rows"]}
    for best in best_known.TABLE:
        assert any(fnmatchcase(metric, best.metric) for metric in rows | set(NOT_RECORDED)), best.metric
        assert any(fnmatchcase(card, best.card) for card in floors.DATA_SHEETS.values()), best.card
        assert (best.value is None) != (best.share is None) and best.of


@pytest.mark.slow
def test_drafting_asked_for_by_name_is_run_dry_with_a_step_of_every_number_of_drafts(dry_run: Ran) -> None:
    rows = {row["metric"]: row for row in dry_run[2]["sections"]["drafting"]["rows"]}
    for title in ("1b float32", "1b int8"):
        for batch in (1, 2):
            assert rows[f"{title}: batch {batch}, plain step"]["measured"] > 0
            for what in ("no drafts, KV sync only", "1 drafts", "4 drafts"):
                detail = rows[f"{title}: batch {batch}, decode step of {what}"]["detail"]
                parts = [detail[f"{part}_ms"] for part in ("verify", "draft", "rest")]
                assert sum(parts) == pytest.approx(detail["step_ms"]) and detail["v"] > 0
            for length in drafting.LENGTHS:
                row = rows[f"{title}: batch {batch}, 4 drafts, acceptance length {length} (simulated)"]
                assert row["measured"] == pytest.approx(detail["step_ms"] / length, rel=1e-3)


@pytest.mark.slow
def test_mixtures_asked_for_by_name_are_run_dry_in_both_forms(tmp_path: Path) -> None:
    rows = {row["metric"]: row for row in run_dry(tmp_path, "mixtures")[2]["sections"]["mixtures"]["rows"]}
    for name, stored in (("Qwen3-30B-A3B", "int4 g128"), ("gpt-oss-20b", "int4 g32 experts")):
        plain, packed = (rows[f"{name} shape, {form}: decode, batch 1"] for form in ("bf16", stored))
        assert plain["measured"] > 0 and packed["measured"] > 0
        assert 0 < packed["detail"]["active_gb"] < plain["detail"]["active_gb"]


def test_a_model_that_does_not_fit_has_fewer_layers() -> None:
    """A layer of Qwen3-30B-A3B has 623 million weights, and one of gpt-oss-20b 820 million."""
    for name, layers, billions in (("Qwen3-30B-A3B", 48, 0.623), ("gpt-oss-20b", 24, 0.820)):
        subject = mixtures.SUBJECTS[name]
        ends = 4.0 * subject.config["hidden_size"] * subject.config["vocab_size"]
        assert mixtures.layers_that_fit(subject.config, None, ends + 10.5 * 2e9 * billions) == 10
        assert mixtures.layers_that_fit(subject.config, None, 1e12) == layers
        assert (
            mixtures.layers_that_fit(subject.config, subject.four_bits, ends + 10.5 * 2e9 * billions) > 30 - layers // 2
        )


def test_attention_is_measured_against_what_it_reads_or_multiplies() -> None:
    """At 1 TB/s and 1000 TFLOP/s: a window's keys alone are read; a latent key is read once, for 128 heads."""
    rates = {"read_gb_s": 1000.0, "gemm_tflop_s": 1000.0}

    def limit_ms(case: attention_speed.AttentionCase, rates: dict[str, float]) -> float:
        return floors.attention(case).ms(rates)

    window = attention_speed.AttentionCase("decode", ((1, 8000),), **attention_speed.SINKS)
    assert limit_ms(window, rates) == pytest.approx(128 * 8 * 64 * 4 / 1e9)
    latent = attention_speed.AttentionCase("MLA", ((1, 8000),), **attention_speed.LATENT)
    assert limit_ms(latent, rates) == pytest.approx(8000 * 576 * 2 / 1e9)
    assert limit_ms(latent, {**rates, "read_gb_s": 1e6}) == pytest.approx(8000 * 128 * 2 * 1088 / 1e12)


def drafted(wall_ms: float, device_ms: float, draft_ms: float) -> DecodeStep:
    """A decode step as an engine reports it."""
    event = StepEvent(
        at_s=0.0, step=1, duration_ms=wall_ms, host_ms=0.1, device_ms=device_ms, gap_ms=0.0, num_requests=1,
        num_prefill_tokens=0, num_decode_tokens=5, running=1, waiting=0, kv_used=0.1, drafted=4, num_draft_tokens=4,
        draft_ms=draft_ms,
    )  # fmt: skip
    return DecodeStep(wall_ms, event)


def test_costs_of_drafting_are_counted_in_plain_steps_of_the_device() -> None:
    found = drafting.summed_up([drafted(7.0, 5.0, 1.6)] * 3, 4)
    context = Context(registry.BY_NAME["drafting"], Path(), dry_run=True)
    subject = drafting.Subject("8b bf16", context, SHAPES["8b"], 2.0)
    row = drafting.step_row(subject, found, 1, drafting.Plain(4.2, 4.0), floors.Bars(3.5, 3.0))
    assert row.detail["c"] == pytest.approx(0.1) and row.detail["v"] == pytest.approx(1.25)
    assert row.detail["rest_ms"] == pytest.approx(0.4) and row.share == 0.5 and row.floor == 3.0 and not row.failed


def test_a_plain_step_takes_the_median_on_each_clock() -> None:
    steps = [drafted(wall, device, 0.0) for wall, device in ((4.0, 9.0), (5.0, 3.0), (6.0, 4.0))]
    assert drafting.medians(steps) == drafting.Plain(5.0, 4.0)


def test_drafting_timed_while_the_model_is_still_at_work_is_not_counted_twice() -> None:
    """A host that waits for the model inside a drafter's call sees both times; a step has no more than its own."""
    found = drafting.summed_up([drafted(7.0, 5.0, 6.9)] * 3, 4)
    assert found.draft == pytest.approx(2.0) and found.rest == pytest.approx(0.0)


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00 */
        /*0010*/                   PREEXIT ;                               /* 0x00 */
        {above}
        /*0030*/                   ACQBULK ;                               /* 0x00 */
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;        /* 0x00 */
        /*0050*/                   STG.E desc[UR4][R2.64], R5 ;            /* 0x00 */
"""
LOAD = "/*0020*/             @!P0  LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;"
STORE = "/*0020*/                   STG.E desc[UR4][R2.64], R5 ;"


@pytest.mark.parametrize(
    ("above", "with_weights", "without"), [(LOAD, True, True), ("", False, True), (STORE, False, False)]
)
def test_a_kernel_is_right_if_its_weights_are_loaded_and_nothing_is_stored_above_the_wait(
    monkeypatch: pytest.MonkeyPatch, above: str, with_weights: bool, without: bool
) -> None:
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: SASS.format(above=above))
    assert machine_code.judge("linear", b"", has_weights=True).is_right == with_weights
    assert machine_code.judge("norm", b"", has_weights=False).is_right == without


def test_a_kernel_that_never_waits_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: SASS.format(above=LOAD).replace("ACQBULK", "NOP"))
    found = machine_code.judge("linear", b"", has_weights=True)
    assert not found.is_right and str(found) == "linear: never waits"
    assert machine_code.summary("linear", [found]).held is False


def test_compiling_and_capturing_are_noticed_and_the_hooks_put_back() -> None:
    before = triton.knobs.runtime.jit_post_compile_hook
    capture = torch.cuda.CUDAGraph.capture_begin
    with mixed.watched() as late:
        assert triton.knobs.runtime.jit_post_compile_hook is not None
        triton.knobs.runtime.jit_post_compile_hook(repr="a kernel that was not warmed up")
        with pytest.raises(Exception):  # noqa: B017  (without a device, whatever torch says)
            torch.cuda.CUDAGraph.capture_begin(None)
    assert late.compiled == ["a kernel that was not warmed up"] and late.captured == 1
    assert triton.knobs.runtime.jit_post_compile_hook is before and torch.cuda.CUDAGraph.capture_begin is capture


def test_dependent_launch_is_off_for_all_who_ask_and_then_on_again() -> None:
    from engine.kernels.triton import device, launch

    asks = device.has_dependent_launch
    with dependent_launch.switched_off():
        assert launch.has_dependent_launch is not asks and not launch.has_dependent_launch("cuda")
    assert device.has_dependent_launch is launch.has_dependent_launch is asks


@pytest.mark.parametrize(
    ("dtype", "margins", "noise", "held"),
    [("float32", [], 0.0, True), ("float32", [1e-6], 0.0, False), ("bfloat16", [0.1], 0.2, True),
     ("bfloat16", [0.3], 0.2, False), ("bfloat16", [float("inf")], 9.0, False)],
)  # fmt: skip
def test_float32_may_never_differ_and_bfloat16_only_at_near_ties(
    dtype: str, margins: list[float], noise: float, held: bool
) -> None:
    assert laws.verdict("latency", dtype, laws.Tally(outputs=16, margins=margins), noise).held is held


def test_a_law_without_outputs_or_with_a_broken_engine_does_not_hold() -> None:
    assert laws.verdict("latency", "float32", laws.Tally(), 0.0).held is False
    assert laws.verdict("latency", "bfloat16", laws.Tally(outputs=8, broken=["graphs: no"]), 9.0).held is False


def test_rounding_shifts_are_measured_between_tokens() -> None:
    """A shift of all logprobs moves no token past another; opposite shifts add up."""
    assert laws.shift([{1: -1.0, 2: -2.0}], [{1: -1.5, 2: -2.5}]) == pytest.approx(0.0)
    assert laws.shift([{1: -1.0, 2: -2.0}], [{1: -1.25, 2: -1.75, 3: -9.0}]) == pytest.approx(0.5)


PYTEST_OUTPUT = """
tests/a.py::test_one PASSED                                              [ 25%]
tests/a.py::test_two[x - y] {second}                                     [ 50%]
tests/a.py::test_three SKIPPED (no reason)                               [ 75%]
[gw0] [100%] PASSED tests/a.py::test_four
"""


@pytest.mark.parametrize(
    ("text", "code", "held"),
    [(PYTEST_OUTPUT.format(second="PASSED"), 0, True), (PYTEST_OUTPUT.format(second="FAILED"), 1, False),
     (PYTEST_OUTPUT.format(second="PASSED"), None, None), ("no module named pytest", 1, False)],
)  # fmt: skip
def test_a_test_suite_that_was_stopped_is_neither_held_nor_failed(
    tmp_path: Path, text: str, code: int | None, held: bool | None
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(text)
    row = kernel_tests.summed_up("tests/a.py", code, log)
    assert row.held is held and row.failed is (held is False)
    assert ("stopped" in str(row.measured)) == (code is None)


def test_an_engine_nobody_installed_is_found_by_its_metadata(tmp_path: Path) -> None:
    folder = standalone.write_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    entries = {(entry.group, entry.name, entry.value) for entry in found.entry_points}
    assert found.name == "engine" and ("engine.plugins.v1", "drafter", "engine_plugins.drafter") in entries


def test_metadata_once_written_stays_on_the_path_of_every_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "is_installed", lambda: False)
    first = standalone.source_paths(tmp_path)
    monkeypatch.setattr(standalone, "is_installed", lambda: True)  # as it looks once the paths are in use
    assert standalone.source_paths(tmp_path) == first and first[-1] == str(tmp_path / "metadata")
    assert first[-1] not in standalone.source_paths(tmp_path / "elsewhere")


def test_what_has_no_wheel_for_the_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``compiled`` could only be built for this Python, ``pure`` for every one."""

    def pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder, name = Path(arguments[-2]), arguments[-1]
        if command == "wheel":
            (folder / f"{name}-1.0-{'py3-none-any' if name == 'pure' else 'cp311-cp311-linux'}.whl").touch()
        return subprocess.CompletedProcess([], int(command == "download"), "", "no matching distribution")

    monkeypatch.setattr(wheels, "_pip", pip)
    assert [wheel.name for wheel in wheels.gather(tmp_path / "pure", "3.12", ("pure",))] == [
        "pure-1.0-py3-none-any.whl"
    ]
    with pytest.raises(ValueError, match=r"compiled: no wheel for Python 3\.12, and none for every Python"):
        wheels.gather(tmp_path / "compiled", "3.12", ("pure", "compiled"))
