"""The command from an SLO to a preset, with measurements whose truth is known, and once with real engines."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.assemble import configure
from engine.cli.main import main
from engine.contracts.command import OK, USAGE
from engine_lab.sweep import order, quality
from engine_lab.sweep.measure import Measure
from engine_lab.sweep.record import PROOF, Round, Run, load
from engine_lab.tune.main import NONE

SLO = ("--slo", "ttft=500ms,itl=50ms", "--no-quality")
GRID = ("device=cpu", "drafter=none,ngram,suffix", "scheduler.token_budget=512,2048", "quantizer=checkpoint,int8")
TRUTH = {"drafter=ngram": 0.7, "quantizer=int8": 0.8, "drafter=suffix": 0.9}
"""By what factor a line changes what is taken of the SLO."""


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Runs are not made: they have the figures of these factors, and 3 % of noise."""
    factors = dict(TRUTH)

    async def measured(self: Any, which: int, number: int, asked: Round) -> Run:
        value = 1.5 * exp(random.Random(f"{number}").gauss(0.0, 0.1))
        value *= exp(random.Random(f"{number}/{which}").gauss(0.0, 0.03))
        for line, factor in factors.items():
            value *= factor if line in self._experiment.candidates[which].words else 1.0
        keys = ("e2e", "ttft_p95", "itl_p95", "slo")
        return Run(which, number, dict.fromkeys(keys, value) | {"tokens_per_s": 1.0 / value}, 5.0)

    monkeypatch.setattr(Measure, "__call__", measured)
    monkeypatch.setattr(order, "spec_of", lambda words, config_dirs: None)  # sizing takes longest
    return factors


def tune(folder: Path, *words: str) -> int:
    return main(["tune", *SLO, "--folder", str(folder), *words])


def test_the_best_set_is_proven_and_written_as_a_preset_with_what_each_line_brings(truth, tmp_path, capsys):
    assert tune(tmp_path, *GRID) == OK
    file = tmp_path / "preset" / "mine.yaml"
    text = file.read_text()
    assert text.startswith("# @package _global_\n") and "# SLO: kept with this set" in text
    assert "drafter=ngram: brings a factor of 0.6" in text or "drafter=ngram: brings a factor of 0.7" in text
    assert "quantizer=int8: brings a factor of" in text and "SLO: not kept with the baseline" in text
    assert not [line for line in text.splitlines() if "token_budget" in line and line[0] != "#"]
    composed = configure(["+preset=mine"], [tmp_path]).composed
    assert composed.tree() == configure(["device=cpu", "drafter=ngram", "quantizer=int8"]).composed.tree()
    proof = load(tmp_path / "results.json").summary["proof"]
    assert proof["is_proven"] and proof["figures"]["slo"]["low"] < 0.7 * 0.8 < proof["figures"]["slo"]["high"]
    assert f"mine.yaml (SLO kept); engine serve --config-dir {tmp_path} +preset=mine" in capsys.readouterr().out


def test_a_class_that_does_not_come_in_every_run_costs_the_proof_nothing(truth, tmp_path, monkeypatch):
    measured = Measure.__call__

    async def mixed(self: Any, which: int, number: int, asked: Round) -> Run:
        run = await measured(self, which, number, asked)
        run.figures["slo of often"] = run.figures["slo"]
        if number % 3 == 2:
            run.figures["slo of rare"] = 0.1
        return run

    monkeypatch.setattr(Measure, "__call__", mixed)
    assert tune(tmp_path, *GRID) == OK
    figures = load(tmp_path / "results.json").summary["proof"]["figures"]
    assert "slo of often" in figures and "slo of rare" not in figures


@pytest.mark.parametrize("factors", [{}, {"drafter=ngram": 1.3, "drafter=suffix": 1.2, "quantizer=int8": 1.2}])
def test_no_set_is_named_where_none_is_better_than_the_baseline(truth, tmp_path, capsys, factors: Mapping[str, float]):
    truth.clear()
    truth.update(factors)
    assert tune(tmp_path, *GRID) == NONE
    said = " ".join(capsys.readouterr().out.split())
    assert "no set is named, and no preset written" in said and "; the baseline does not keep the SLO" in said
    assert not (tmp_path / "preset" / "mine.yaml").exists()


def test_a_winner_of_the_sweep_that_fresh_runs_do_not_confirm_is_not_named(truth, tmp_path, monkeypatch, capsys):
    measured = Measure.__call__

    async def lucky(self: Any, which: int, number: int, asked: Round) -> Run:
        if asked.kind == PROOF:
            truth.clear()
        return await measured(self, which, number, asked)

    monkeypatch.setattr(Measure, "__call__", lucky)
    assert tune(tmp_path, *GRID) == NONE
    assert "fresh runs do not tell it from the baseline" in capsys.readouterr().out.replace("\n", " ").replace(
        "  ", " "
    )


def test_a_set_that_loses_too_much_is_never_chosen(truth, tmp_path, monkeypatch):
    async def loss_of(candidate: Any, options: Any) -> tuple[float, str]:
        return (0.02 if "quantizer=int8" in candidate.words else 0.0), "a text"

    monkeypatch.setattr(quality, "loss_of", loss_of)
    words = ["tune", *SLO[:2], "--quality", "1%", "--folder", str(tmp_path), *GRID]
    assert main(words) == OK
    text = (tmp_path / "preset" / "mine.yaml").read_text()
    assert "override /drafter: ngram" in text and "int8" not in text


def test_without_a_grid_there_is_one_of_the_slots_that_the_overrides_leave_open(truth, tmp_path, capsys):
    assert tune(tmp_path, "device=cpu", "drafter=none", "--budget", "20m") == OK
    plan = json.loads((tmp_path / "plan.json").read_text())
    names = {one["name"] for one in plan["sets"]}
    assert "baseline" in names and not any("drafter" in name for name in names)
    assert {one["same_as"] is not None for one in plan["sets"] if "chunked_prefill_latency" not in one["name"]}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--preset", "mine.yaml"), "expected DIR/preset/NAME.yaml"),
        (("--preset", "{folder}/preset/x.yaml", "quantizer=nope"), "no such quantizer option"),
        (("--trace", "/does/not/exist"), "/does/not/exist"),
        (("server.api_key=x",), "server.api_key: the engines of a sweep listen on loopback"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_measured(truth, tmp_path, capsys, words, complaint):
    words = [word.format(folder=tmp_path) for word in words]
    assert tune(tmp_path / "folder", *words) == USAGE and complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_slo_is_needed(tmp_path, capsys):
    assert main(["tune", "--folder", str(tmp_path)]) == USAGE and "--slo is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_real_engines_are_tuned(tmp_path):
    words = ("+preset=baseline", "device=cpu", "drafter=none,ngram", "overlap=false,true", "--output-tokens", "8")
    assert tune(tmp_path, *words, "--warmup", "1", "--budget", "3m") in (OK, NONE)
    found = load(tmp_path / "results.json")
    assert not [one.refused for one in found.candidates if one.refused]
