"""The command from words to its folder, against a server that only speaks the API, and once against real engines."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.lab.shared.fakes import FakeEngine, FakeServers

from engine.cli.main import main
from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench import run
from engine_lab.sweep import main as sweeping
from engine_lab.sweep import order, quality
from engine_lab.sweep.measure import Measure
from engine_lab.sweep.record import load

SMALL = ("device=cpu", "--requests", "3", "--warmup", "0", "--prompt-tokens", "80", "--output-tokens", "3")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(FakeServers, "engine", FakeEngine())
    monkeypatch.setattr(FakeServers, "kept", [])
    monkeypatch.setattr(sweeping, "Servers", FakeServers)
    monkeypatch.setattr(order, "spec_of", lambda words, config_dirs: None)  # sizing takes longest
    monkeypatch.setattr(run, "no_garbage_collection", nullcontext)  # it collects once a run
    return FakeServers.engine


def sweep(folder: Path, *words: str) -> int:
    return main(["sweep", *SMALL, "--folder", str(folder), *words])


def test_a_sweep_leaves_its_plan_results_and_report(engine, tmp_path, capsys):
    words = ("drafter=none,ngram", "seed=1,2", "attention_kernel=cpu,triton", "--no-quality", "--seed", "5")
    assert sweep(tmp_path, *words) == OK
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["options"]["seed"] == 5 and "random, of seed 5: " in plan["order"]
    assert [bool(one["refused"]) for one in plan["sets"]] == [False] * 4 + [True] * 4
    found = load(tmp_path / "results.json")
    assert [(one.kind, len(one.candidates)) for one in found.rounds] == [("screening", 4), ("final", 3)]
    assert len(found.runs) == 4 + 3 * 16 and len({(run.number, run.candidate) for run in found.runs}) == 52
    (header, *rows) = csv.reader((tmp_path / "results.csv").open())
    assert len(rows) == 8 and rows[-1][header.index("status")] == "refused" and float(rows[0][header.index("e2e")]) > 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    said, progress = capsys.readouterr()
    assert "4 not measured further: refused: attention_kernel=triton" in said.replace("\n", " ")
    assert progress.index("4 sets not measured: attention_kernel=triton") < progress.index("pass 1 of")


def test_all_sets_of_a_pass_get_the_same_requests_and_passes_different_ones(engine, tmp_path):
    assert sweep(tmp_path, "drafter=none,ngram", "--no-quality") == OK
    prompts: dict[str, list[str]] = {}
    for body in engine.bodies:
        if body.get("cache_salt", "").startswith("pass"):
            prompts.setdefault(body["cache_salt"], []).append(body["messages"][0]["content"])
    assert len(prompts) == 16 and all(sent[:3] == sent[3:] for sent in prompts.values())
    assert len({sent[0] for sent in prompts.values()}) == 16
    assert all(len(kept) == 1 for kept in FakeServers.kept)


def test_a_trace_is_played_as_it_was(engine, tmp_path):
    lines = [{"timestamp": 10 * i, "input_length": 40 + i, "output_length": 2, "hash_ids": [i]} for i in range(3)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ("drafter=none,ngram", "--no-quality", "--trace", str(tmp_path / "trace.jsonl"))
    assert sweep(tmp_path / "folder", *words) == OK
    assert {body["max_tokens"] for body in engine.bodies if body.get("cache_salt", "").startswith("pass")} == {2}


MIXTURE = """[chat]
slo = "ttft=10s"
turns = 2
[batch]
concurrency = 2
output_tokens = 7
slo = "e2e=20s"
"""


def test_classes_come_together_and_sets_are_ordered_by_the_one_that_takes_most_of_its_limits(engine, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(MIXTURE)
    words = (
        "drafter=none,ngram",
        "--no-quality",
        "--workload",
        str(tmp_path / "mine.toml"),
        "--duration",
        "0.5",
        "--budget",
        "1s",
    )
    assert sweep(tmp_path / "folder", *words) == OK
    found = load(tmp_path / "folder" / "results.json")
    figures = found.runs[0].figures
    assert figures["slo"] == max(figures["slo of chat"], figures["slo of batch"]) and found.summary["by"] == "slo"
    assert {body["max_tokens"] for body in engine.bodies if body.get("cache_salt", "").startswith("pass")} == {3, 7}
    (header, *_) = csv.reader((tmp_path / "folder" / "results.csv").open())
    assert "slo of batch" in header and "SLO share of batch" in (tmp_path / "folder" / "report.html").read_text()
    assert "SLO: chat ttft=10000ms; batch e2e=20000ms" in capsys.readouterr().out
    assert sweep(tmp_path / "folder", *words) == OK  # nothing has changed


def test_a_sampler_measures_so_many_sets_of_a_grid(engine, tmp_path, capsys):
    pytest.importorskip("optuna")
    grid = ("drafter=none,ngram", "scheduler.token_budget=range(64,257,64)", "attention_kernel=cpu,triton")
    assert sweep(tmp_path, *grid, "--no-quality", "--samples", "5") == OK
    found = load(tmp_path / "results.json")
    assert len({run.candidate for run in found.runs}) == 5
    said = " ".join(capsys.readouterr().out.split())
    assert "as Optuna's TPE sampler picks 5 sets" in said and "3 not measured further: " in said


def test_an_interrupted_sweep_goes_on_with_the_same_command(engine, tmp_path, monkeypatch, capsys):
    measure, calls = Measure.__call__, []

    async def interrupted(self: Any, *words: Any) -> Any:
        calls.append(words)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return await measure(self, *words)

    monkeypatch.setattr(Measure, "__call__", interrupted)
    words = ("drafter=none,ngram", "--no-quality")
    assert sweep(tmp_path, *words) == INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    before = load(tmp_path / "results.json")
    assert len(before.runs) == 4 and sweep(tmp_path, *words) == OK
    after = load(tmp_path / "results.json")
    assert after.runs[:4] == before.runs and len(after.runs) == 32
    assert sweep(tmp_path, *words, "--seed", "1") == USAGE
    assert "was made with seed 0, not 1; give another --folder" in capsys.readouterr().err


def test_quality_is_measured_where_sets_differ_in_it_and_a_limit_drops_sets(engine, tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    async def loss_of(candidate: Any, options: Any) -> tuple[float, str]:
        asked.append(candidate.name)
        return (0.05 if "int4" in candidate.name else 0.001), "a text"

    monkeypatch.setattr(quality, "loss_of", loss_of)
    assert sweep(tmp_path / "alike", "drafter=none,ngram") == OK and asked == []
    assert sweep(tmp_path / "a", "drafter=none,ngram", "quantizer=checkpoint,int4,int8", "--quality", "1%") == OK
    assert len(asked) == 3
    found = load(tmp_path / "a" / "results.json")
    refused = {one.name: one.refused for one in found.candidates if one.refused}
    assert len(refused) == 2 and set(refused.values()) == {"loses 5.00% (perplexity); --quality allows 1.00%"}
    assert {one.loss for one in found.candidates} == {0.05, 0.001}


def test_a_server_that_fails_all_is_said_and_nothing_is_named(engine, tmp_path, capsys):
    engine.broken = True
    assert sweep(tmp_path, "drafter=none,ngram", "--no-quality") == FAILED
    assert "no best set" in (said := capsys.readouterr().out) and "3 of 3 requests failed: http_500" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--by", "slo"), "--by slo needs the limits"),
        (("--samples", "3"), "--samples 3: expected more than the 3 sets of the last round"),
        (("--slo", "ttft=1s"), "--requests 3: expected at least 20, as --by slo compares a P95 of each run"),
        (("--budget", "15"), "'15': expected a time such as 90s, 15m or 2h"),
        (("--quality", "1%", "--no-quality"), "--quality and --no-quality exclude each other"),
        (("--trace", "/does/not/exist"), "/does/not/exist"),
        (("--workload", "/does/not/exist"), "--workload /does/not/exist: expected TOML"),
        (("--trace", "x", "--duration", "1"), "--trace has its own requests"),
        (("--text", "/does/not/exist"), "--text /does/not/exist: expected a file of UTF-8 text"),
        (("drafter=nope,nada",), "no such drafter option"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_any_engine_starts(engine, tmp_path, capsys, words, complaint):
    try:
        status = sweep(tmp_path / "folder", *words)
    except SystemExit as stopped:
        status = stopped.code
    assert status == USAGE and complaint in capsys.readouterr().err and FakeServers.kept == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_real_engines_are_swept(tmp_path, capsys):
    words = ("+preset=latency", "drafter=none,ngram", "quantizer=checkpoint,int8", "--requests", "2", "--budget", "2m")
    assert sweep(tmp_path, *words, "--output-tokens", "4") == OK
    found = load(tmp_path / "results.json")
    assert not [one.refused for one in found.candidates if one.refused] and found.rounds
    measured = [one for one in found.candidates if one.facts]  # as many as there was time for
    assert measured and all(one.loss is not None and one.facts["weights_bytes"] for one in measured)
