"""The command from flags to report, against servers that only speak the API, and once against real engines."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from typing import Any

import pytest
from tests.lab.shared.fakes import FakeEngine, FakeServers

from engine.cli.main import main
from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench import run
from engine_lab.ladder import climb as climbing
from engine_lab.ladder.options import add_flags, options_of
from engine_lab.ladder.record import load
from engine_lab.ladder.requests import max_tokens, own_part_first
from engine_lab.ladder.rungs import Form

RUNGS = ("--rung", "streaming: workload.stream=true", "--rung", "cap: workload.max_tokens=p99")
RUNGS = (*RUNGS, "--rung", "static: workload.static_first=true engine=two")
SMALL = ("--pairs", "6", "--requests", "2", "--prompt-tokens", "80", "--shared-prefix", "0.5", "--observe", "5")
SMALL = (*SMALL, "--no-floor")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(FakeServers, "engine", FakeEngine())
    monkeypatch.setattr(FakeServers, "kept", [])
    monkeypatch.setattr(climbing, "Servers", FakeServers)
    monkeypatch.setattr(run, "no_garbage_collection", nullcontext)  # it collects once a run
    return FakeServers.engine


def ladder(*words: str) -> int:
    return main(["ladder", *SMALL, *words])


def test_a_ladder_is_climbed_saved_and_reported(engine, tmp_path, capsys):
    file, html = tmp_path / "ladder.json", tmp_path / "ladder.html"
    assert ladder(*RUNGS, "--rung", "x: bad=1", "--json", str(file), "--html", str(html), "--slo", "e2e=9s") == OK
    found = load(str(file))
    assert [(m.kind, m.name, len(m.pairs)) for m in found.comparisons] == [
        ("added", "streaming", 6),
        ("added", "cap", 6),
        ("added", "static", 6),
        ("all", "all rungs", 6),
        ("left out", "streaming", 6),
        ("left out", "cap", 6),
    ]
    assert [(s.rung, s.refused) for s in found.surveys if s.refused] == [("x", "note\nbad=1: no such key")]
    assert found.output_lengths == [5] * 5
    first = found.summary["rows"][0]
    assert first["outputs"]["equal"] == 8 and first["users"]["apart"] > 0
    assert first["figures"].keys() == {"output_p50", "ttft_p50", "itl", "e2e_p50", "goodput"}
    assert "refused: x: bad=1" in (told := capsys.readouterr().out) and "TTFT P95 needs 20 requests a run" in told
    assert html.read_text().startswith("<!doctype html>")


def test_both_sides_of_a_pair_get_the_same_prompts_in_the_order_of_the_plan(engine, tmp_path):
    file = tmp_path / "ladder.json"
    assert ladder("--rung", "streaming: workload.stream=true", "--json", str(file), "--outputs", "0") == OK
    runs = [body for body in engine.bodies if body.get("cache_salt", "").startswith("added/")]
    pairs = [runs[i : i + 4] for i in range(0, len(runs), 4)]
    order = [not pair[0]["stream"] for pair in pairs]
    assert order == load(str(file)).comparisons[0].comparison.order(0, 6)
    for pair in pairs:
        prompts = [body["messages"][0]["content"] for body in pair]
        assert prompts[:2] == prompts[2:] and prompts[0] != prompts[1]
        assert [body["cache_salt"] for body in pair[:2]] != [body["cache_salt"] for body in pair[2:]]
    assert len({pair[0]["messages"][0]["content"] for pair in pairs}) == 6


def test_only_equal_engines_beside_each_other_are_two_for_the_same_overrides(engine):
    assert ladder("--rung", "streaming: workload.stream=true", "--aa", "1") == OK
    engines = [{(words, copy) for words, copy in wanted} for wanted in FakeServers.kept]
    assert [len(found) for found in engines] == [1, 1, *[1] * 6, *[2] * 6]


@pytest.mark.parametrize(("words", "times"), [((), 6 + 1), (("--resident",), 1)])
def test_different_engines_are_started_for_every_pair_unless_they_shall_stay(engine, monkeypatch, words, times):
    monkeypatch.setattr(FakeServers, "closed", 0)
    assert ladder("--rung", "two: engine=two", *words) == OK
    assert FakeServers.closed == times
    first = [wanted[0] for wanted in FakeServers.kept[2:]]
    assert len({*first[:2]}) == 2  # which one is started first alternates, too


def test_an_interrupted_ladder_goes_on_where_it_was(engine, tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "ladder.json")
    run, calls = climbing.Requests.run, []

    async def interrupted(self: Any, *words: Any) -> Any:
        calls.append(words)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return await run(self, *words)

    monkeypatch.setattr(climbing.Requests, "run", interrupted)
    assert ladder(*RUNGS, "--json", file) == INTERRUPTED
    assert f"--resume {file}" in capsys.readouterr().err
    before = load(file)
    assert [len(measured.pairs) for measured in before.comparisons] == [3]
    assert ladder(*RUNGS, "--resume", file) == OK
    after = load(file)
    assert {len(measured.pairs) for measured in after.comparisons} == {6}
    assert after.comparisons[0].pairs[:3] == before.comparisons[0].pairs
    assert ladder(*RUNGS, "--resume", file, "--seed", "1") == USAGE
    assert "was made with seed 0, not 1" in capsys.readouterr().err


def test_a_baseline_that_does_not_start_is_wrong_usage(engine, capsys):
    assert ladder("bad=1", *RUNGS) == USAGE
    assert "the engine of the baseline does not start:\nnote\nbad=1" in capsys.readouterr().err


def test_rungs_that_are_all_refused_are_wrong_usage(engine, capsys):
    assert ladder("--rung", "one: bad=1", "--rung", "two: bad=2") == USAGE
    assert "with none of the rungs:\none: note\nbad=1: no such key\ntwo: note" in capsys.readouterr().err


def test_a_text_that_is_not_there_is_wrong_usage(engine, capsys):
    assert ladder("--text", "/does/not/exist", *RUNGS) == USAGE
    assert "--text /does/not/exist: expected a file of UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rungs", "complaint"), [(RUNGS[:2], "every request of a run failed"), (RUNGS, "no answer to observe")]
)
def test_requests_that_all_fail_end_the_ladder_with_their_words(engine, capsys, rungs, complaint):
    engine.broken = True
    assert ladder(*rungs, "--outputs", "0") == FAILED
    assert complaint in (said := capsys.readouterr().err) and "broken" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--rung", "no colon"), "expected NAME: OVERRIDE"),
        (("--rungs", "/does/not/exist"), "--rungs /does/not/exist: expected a file"),
        (("--pairs", "5"), "expected a whole number of at least 6"),
        (("--level", "1"), "--level 1: expected at least 0.5 and less than 1"),
        (("--resume", "/does/not/exist"), "--resume /does/not/exist: expected a file written by"),
        (("--html", "/does/not/exist/x.html"), "--html /does/not/exist/x.html: expected a file that can be written"),
        (("--json", "/does/not/exist/x.json"), "--json /does/not/exist/x.json: expected a file that can be written"),
        (("--rate", "2", "--concurrency", "2"), "exclude each other"),
        (("--prompt-ids", "--endpoint", "chat"), "--prompt-ids needs --endpoint completions"),
        (("workload.stream=maybe",), "expected true or false"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_any_engine_starts(engine, capsys, words, complaint):
    try:
        status = main(["ladder", *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == USAGE and complaint in capsys.readouterr().err and FakeServers.kept == []


def test_the_own_part_of_a_prompt_comes_first_unless_the_static_one_does():
    assert own_part_first("sharedown", 2 / 3) == "ownshared"
    assert own_part_first((1, 2, 3, 4), 0.5) == (3, 4, 1, 2)


def test_the_limit_of_tokens_is_observed_given_or_none():
    assert max_tokens(Form(max_tokens="p99"), list(range(1, 201))) == 198
    assert max_tokens(Form(max_tokens="7"), []) == 7
    assert max_tokens(Form(), [1, 2]) is max_tokens(Form(max_tokens="p99"), []) is None


def test_defaults_are_enough_for_a_ladder():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = options_of(parser.parse_args([]))
    assert len(options.rungs) == 8 and options.pairs == 10 and options.endpoint == "chat"
    assert json.loads(json.dumps(options.fixed())) == options.fixed()


@pytest.mark.slow
def test_two_real_engines_take_turns(tmp_path, capsys):
    file = tmp_path / "ladder.json"
    rungs = ("--rung", "streaming: workload.stream=true", "--rung", "quantizer: quantizer=int8")
    words = ("--output-tokens", "4", "--outputs", "1", "--json", str(file), "device=cpu")
    assert ladder("+preset=latency", "--requests", "1", *rungs, *words) == OK
    found = load(str(file))
    assert {len(measured.pairs) for measured in found.comparisons} == {6} and len(found.comparisons) == 4
    sizes = [survey.facts["weights_bytes"] for survey in found.surveys]
    assert sizes[0] == sizes[1] > sizes[2]
