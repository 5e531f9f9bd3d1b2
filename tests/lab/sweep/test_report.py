"""What is said of runs that are known."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest
from rich.console import Console

from engine_lab.sweep.analysis import adjusted, summarise_sweep
from engine_lab.sweep.command import COMMAND
from engine_lab.sweep.options import SweepOptions, options_of
from engine_lab.sweep.page import page
from engine_lab.sweep.record import FINAL, SCREENING, Candidate, Experiment, Round, Run
from engine_lab.sweep.screen import render
from engine_lab.sweep.table import write_csv
from engine_lab.sweep.wording import conclusion, notes


def options(*words: str) -> SweepOptions:
    parser = argparse.ArgumentParser()
    COMMAND.flags(parser)
    parser.set_defaults(config_dir=[])
    return options_of(parser.parse_args(words))


def recorded(tie: bool = False) -> Experiment:
    """Four sets: one is refused, one is out after a pass in which all requests took twice as long."""
    names = ("fast <b>", "near", "slow", "refused")
    experiment = Experiment(("x=*",), {}, [Candidate(i, name, (f"x={i}",)) for i, name in enumerate(names)])
    experiment.candidates[3].refused = "x=3 cannot run"
    experiment.candidates[0].facts = {"planned_bytes": 3e6, "kv_bytes": 1e6, "kv_tokens": 8192.0}
    experiment.rounds = [Round(SCREENING, [0, 1, 2], 1, 0), Round(FINAL, [0, 1], 6, 1)]
    level = {0: 10.0, 1: 10.0 if tie else 12.0, 2: 20.0}

    def run(which: int, number: int) -> Run:
        value = level[which] * (2.0 if number == 0 else 1.0) * (1.0 + 0.01 * ((number * (which + 1)) % 3))
        figures = {"e2e": value, "ttft_p95": value / 2, "itl_p95": value / 9, "tokens_per_s": 1e3 / value}
        return Run(which, number, figures, 10.0)

    experiment.runs = [run(which, number) for number in range(7) for which in ((0, 1) if number else (0, 1, 2))]
    experiment.elapsed_s = 150.0
    experiment.summary = summarise_sweep(experiment, options())
    return experiment


def test_a_best_set_is_named_with_its_interval_and_a_tie_with_whom() -> None:
    best = conclusion(recorded())
    assert best.startswith("best: fast <b>: 0.8") and best.endswith("of near")
    assert conclusion(recorded(tie=True)).startswith("no best set: ") and "cannot be told apart" in conclusion(
        recorded(tie=True)
    )


def test_figures_of_a_set_that_had_the_hard_pass_alone_are_told_beside_the_others_of_that_pass() -> None:
    """The slow set ran in a pass of twice the time only."""
    slow, fast = (adjusted(recorded(), which, "e2e") for which in (2, 0))
    assert slow is not None and fast is not None and slow / fast == pytest.approx(2.0, rel=0.05)


def test_the_report_has_every_set_with_what_became_of_it(tmp_path: Path) -> None:
    experiment = recorded()
    rows = {row["name"]: row for row in experiment.summary["rows"]}
    assert [row["status"] for row in rows.values()] == ["last round", "last round", "out after round 1", "refused"]
    assert rows["fast <b>"]["memory"] == 3e6 and [name for name, row in rows.items() if row["pareto"]] == ["fast <b>"]
    assert "1 not measured further: refused: x=3 cannot run" in notes(experiment)
    text = page(experiment)
    assert "fast &lt;b&gt;" in text and "<b>" not in text and "x=3 cannot run" in text and text.count("<circle") == 3
    write_csv(experiment, tmp_path / "x.csv")
    assert [row["name"] for row in csv.DictReader((tmp_path / "x.csv").open())] == list(rows)
    console = Console(width=80, record=True)
    console.print(render(experiment))
    assert all(len(line) <= 80 for line in console.export_text().splitlines())


def test_a_sweep_whose_runs_are_mostly_starts_says_that_more_requests_tell_more() -> None:
    experiment = recorded()
    for run in experiment.runs:
        run.figures["requests_per_s"] = 10.0
    experiment.options = {"requests": 20}
    said = "requests took 20% of a run, the rest is the start of its engine and the warm-up"
    assert said in "\n".join(notes(experiment))
    experiment.options = {"requests": 60}
    assert said[:15] not in "\n".join(notes(experiment))


def test_a_folder_is_named_by_what_is_asked_for_but_not_by_the_budget() -> None:
    words = ["drafter=*"]
    asked = options("--budget", "5m").folder_of(words, "sweep")
    assert (
        asked == options("--budget", "2h").folder_of(words, "sweep") != options("--rate", "2").folder_of(words, "sweep")
    )
    assert options("--folder", "here").folder_of(words, "sweep") == Path("here")
    assert options("--budget", "1.5h", "--quality", "0.5%").budget_s == 5400.0
