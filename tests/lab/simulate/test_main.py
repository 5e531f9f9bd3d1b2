"""``engine simulate`` from its command line."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.contracts.step_cost import StepCost, StepWork
from engine.loop.step_cost import StepCostModel
from engine.startup.calibration import calibration as calibration_of_plan
from engine_lab.shared.simulation.calibration import SCHEMA, Calibration, write_calibration
from engine_lab.shared.sizing import size_plan
from engine_lab.simulate.assumptions import steps_of

SLOW = StepCost(10.0, 0.05, 100)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rng, now, lines = random.Random(1), 0.0, []
    for i in range(60):
        now += rng.expovariate(8.0) * 1e3
        prompt = {"input_length": rng.randint(100, 900), "hash_ids": [i % 3]}
        lines.append(json.dumps({"timestamp": round(now), "output_length": rng.randint(2, 40), **prompt}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration(SCHEMA, SLOW, num_blocks=500))
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words, "--json", "-"]) == 0
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes(trace: str, calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--calibration", calibration, "drafter=ngram", "--seed", "3", "--slo", "ttft=1s,itl=20ms")
    first = simulated(capsys, *words)
    assert first == simulated(capsys, *words)
    result = json.loads(first)
    assert result["source"] == result["sets"][0]["source"] == "simulated"
    assert result["sets"][0]["good"] > 0 and result["kv_blocks"] == [500]


def test_a_comparison_names_the_winner(trace: str, calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--compare", "scheduler.max_requests=1", "--compare", "seed=5", "--batches", "10")
    result = json.loads(simulated(capsys, trace, "--calibration", calibration, *words))
    slower, same = ({v["measure"]: v["verdict"] for v in s["against_first"]} for s in result["sets"][1:])
    assert slower["mean TTFT"] == "worse"
    assert set(same.values()) == {"no difference shown"}


def test_more_engines_and_a_lower_rate_shorten_the_queue(
    trace: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def ttft(*words: str) -> float:
        result = json.loads(simulated(capsys, trace, "--calibration", calibration, "scheduler.max_requests=2", *words))
        return float(result["sets"][0]["ttft_ms"]["mean"])

    alone = ttft()
    assert ttft("--engines", "3") < alone and ttft("--rate-scale", "0.2") < alone and ttft("--rate", "1") < alone


def test_routers_are_compared_as_any_plugins(trace: str, calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--engines", "3", "router=direct", "--compare", "router=prefix", "--batches", "10", "--rate-scale", "3")
    result = json.loads(simulated(capsys, trace, "--calibration", calibration, *words))
    assert [sum(engine["steps"] > 0 for engine in each["engines"]) for each in result["sets"]] == [1, 3]
    assert result["sets"][1]["against_first"][0]["verdict"] == "better"


def test_first_tokens_in_time_are_counted_by_class(
    trace: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (trace, "--calibration", calibration, "slo.classes.chat.ttft_ms=40")
    both = (*words, "--compare", "slo.classes.chat.ttft_ms=2000")
    counts = [each["classes"]["chat"] for each in json.loads(simulated(capsys, *both))["sets"]]
    assert {each["requests"] for each in counts} == {60}
    assert 0 < counts[0]["in_time"] < counts[1]["in_time"] == 60
    assert main(["simulate", *both]) == 0
    assert "first token in time, chat" in capsys.readouterr().out


def test_an_engine_dies_and_one_is_slow(trace: str, calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--calibration", calibration, "--engines", "3", "--rate-scale", "6", "router=round_robin")
    healthy, faulty = (
        json.loads(simulated(capsys, *words, *more)) for more in ((), ("--dies", "0@1", "--slow", "1@3"))
    )
    assert faulty["faults"] == {"dies": [{"engine": 0, "at_s": 1.0}], "slow": [{"engine": 1, "factor": 3.0}]}
    (before,), (after,) = healthy["sets"], faulty["sets"]
    assert after["engines"][0]["steps"] < before["engines"][0]["steps"]
    assert after["engines"][1]["busy"] > before["engines"][1]["busy"]
    assert 0 < after["refused"] < 20 and before["refused"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dies", "3@1"), "--dies 3: expected an engine from 0 to 0 (--engines)"),
        (("--slow", "0"), "0: expected an engine and a number above 0, as in 2@30"),
    ],
)
def test_a_fault_names_an_engine(
    trace: str, calibration: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    try:
        assert main(["simulate", trace, "--calibration", calibration, *words]) == 2
    except SystemExit as ended:  # what argparse refuses
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_the_table_has_the_parts_of_ttft(trace: str, calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace, "--calibration", calibration]) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown and "TTFT: queue, mean (ms)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected one trace"),
        (("a", "b"), "expected one trace, as in engine simulate TRACE [overrides]; there are 2 files: a, b"),
        (("missing", "seed=x"), "seed"),
        (("missing", "--calibration", "missing"), "missing: No such file"),
        (("a", "--rate", "1", "--rate-scale", "2"), "exclude each other"),
    ],
)
def test_wrong_usage_is_told(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_the_engine_has_kept_of_this_plan_is_the_default(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.startup.calibration.user_folder", lambda name: tmp_path / name)
    assert main(["simulate", trace]) == 2
    assert "nothing was measured of this plan on this machine" in capsys.readouterr().err
    sizing = size_plan(())
    model, kept = StepCostModel(), calibration_of_plan(sizing.plan, sizing.mixtures)
    for tokens in range(1, 301):
        model.observe(StepWork(1, tokens, tokens, 0), 5.0 + 0.1 * tokens)
    assert kept is not None
    kept.keep(model.state())
    result = json.loads(simulated(capsys, trace))
    assert result["calibration"]["file"] is None and "bundled on" in result["calibration"]["measured_on"][0]
    assert "; median error of the last predictions: decode steps 0%" in result["calibration"]["measured_on"][0]
    assert result["kv_blocks"] == [sizing.blocks]
    both = json.loads(simulated(capsys, trace, "--compare", "scheduler.max_requests=2"))
    assert len(both["sets"]) == len(both["calibration"]["measured_on"]) == 2
    assert main(["simulate", trace, "--compare", "scheduler.max_requests=2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured: steps: 300 steps of at most 1 rows and 300 tokens (bundled on" in shown
    assert "unknown: api: receiving, tokenizing" in shown and "TTFT: api, mean (ms) │ unknown" in shown
    # steps of another quantizer take another time
    assert main(["simulate", trace, "--compare", "quantizer=int8", "--compare", "scheduler.max_requests=2"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "not simulated: quantizer=int8: nothing was measured" in shown and "max_requests=2, against the" in shown


def test_what_a_trace_measured_is_taken_and_stands_beside_what_is_simulated(
    tmp_path: Path, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"ttft_ms": 40.0, "e2e_ms": 400.0, "receive_ms": 3.0, "tokenize_ms": 2.0, "dispatch_ms": 0.5}
    measured |= {"drafted_tokens": 60, "accepted_tokens": 10, "draft_chains": 20}
    head = {"format": "engine.trace.v1", "started": 1.0, "block_tokens": 16}
    lines = [
        {"arrival_s": i / 4, "prompt_tokens": 200, "output_tokens": 30, "block_hashes": [], "measured": measured}
        for i in range(12)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, (head, *lines))))
    words = (str(path), "--calibration", calibration, "drafter=ngram")
    result = json.loads(simulated(capsys, *words))
    assert result["measured"]["ttft_ms"]["p50"] == 40.0 and result["measured"]["drafts"]["drafted"] == 720
    assert result["sets"][0]["ttft_parts_ms"]["api"] == pytest.approx(5.5)
    origins = {each["name"]: each["origin"] for each in result["assumptions"][0]}
    assert origins["acceptance"] == origins["api"] == "measured"
    assert origins["drafter=ngram"] == origins["shared prefixes"] == "unknown"
    assert main(["simulate", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "┃ measured ┃" in shown and "simulated as given against measured: TTFT mean" in shown
    assert "34% of drafts whose predecessors were accepted" in shown
    other_load = json.loads(simulated(capsys, *words, "--rate", "2", "--acceptance", "0.9"))
    assert other_load["measured"] is None
    assert {each["name"]: each["origin"] for each in other_load["assumptions"][0]}["acceptance"] == "given"


def test_whether_steps_with_drafts_were_measured_is_said() -> None:
    seen = replace(SLOW, largest=StepWork(4, 28, 900, 0, 24), per_draft_ms=0.2)
    for cost, origin in ((SLOW, "assumed"), (seen, "measured")):
        told = {each.name: each.origin for each in steps_of(Calibration(SCHEMA, cost), drafting=True)}
        assert told["steps with drafts"] == origin
    assert "steps with drafts" not in {each.name for each in steps_of(Calibration(SCHEMA, seen), drafting=False)}


def test_a_chance_beyond_certainty_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace, "--acceptance", "5"]) == 2
    assert "expected a number from 0 to 1" in capsys.readouterr().err


def test_no_figure_of_five_sets_is_cut_at_80_columns(
    trace: str, calibration: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    compare = [word for rows in (2, 4, 8, 16) for word in ("--compare", f"scheduler.max_requests={rows}")]
    words = ["simulate", trace, "--calibration", calibration, *compare]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert main([*words, "--json", "-"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert len(sets) == 5 and "…" not in out and max(map(len, out.splitlines())) <= 80
    assert all(f"{each['e2e_ms']['mean']:.2f}" in out.replace("│", " ").split() for each in sets)


def test_kv_stores_are_compared_and_what_is_assumed_of_them_is_said(
    trace: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (trace, "--calibration", calibration, "memory.kv_tokens=1024", "kv_store=[host,disk]")
    words += ("--compare", "kv_store=[]", "--batches", "10", "--store-rate", "disk=2.5")
    result = json.loads(simulated(capsys, *words))
    with_stores, without = result["sets"]
    tokens = with_stores["prompt_tokens"]
    assert tokens["host"] > 0 and tokens["all"] == sum(count for name, count in tokens.items() if name != "all")
    assert without["prompt_tokens"].keys() == {"all", "computed", "pool"} and "stores" not in without
    assert with_stores["cached_share"] > without["cached_share"]
    assert with_stores["stores"]["host"]["loads"] > 0
    host, disk = result["kv_stores"][0]
    assert (host["stands_in"], host["rate_is"]) == (False, "assumed") and host["bytes_per_s"] > 0
    assert (disk["stands_in"], disk["rate_is"], disk["bytes_per_s"]) == (True, "given", 2.5e9)
    assert main(["simulate", *words]) == 0
    shown = capsys.readouterr().out
    assert "cached in host" in shown and "disk: evictions" in shown and "kv_store=disk: simulated" in shown
    assert main(["simulate", trace, "--calibration", calibration, "--store-rate", "disk=1"]) == 2
    assert "--store-rate disk: expected a store of kv_store=[...]" in capsys.readouterr().err
