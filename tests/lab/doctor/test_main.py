"""``engine doctor`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.lab.conftest import Served
from tests.lab.doctor.cases import RECORDED, recorded, slow

from engine.cli.main import main
from engine.contracts.findings import Findings
from engine_lab.doctor import main as doctor
from engine_lab.doctor.evidence import Evidence, write
from engine_lab.doctor.rules import RULES
from engine_lab.shared.live import LiveEngine

MAX_REQUESTS = "scheduler.max_requests"
PRINTED = ("overrides", "replaces", "predicts")
MORE = (slow(0.0, cause="of_a_third_party"),)


def test_recorded_evidence_is_diagnosed_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--evidence", str(RECORDED / "too_few_rows.json")]) == 0
    said = capsys.readouterr().out
    assert "1. too_few_rows" in said
    assert "override: scheduler.max_requests=" in said and "(now scheduler.max_requests=" in said
    assert "this was not the cause" in " ".join(said.split())


def test_beside_a_busy_machine_other_findings_are_said_to_be_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = recorded("too_few_rows")
    busy = [figures | {"waiting_for_core": 0.4, "others_cpus": 1.0, "cpus": 2.0} for figures in evidence.windows]
    taken = [figures | {"stolen_share": 0.0} for figures in busy]
    write(msgspec.structs.replace(evidence, windows=taken), str(tmp_path / "busy.json"))
    assert main(["doctor", "--evidence", str(tmp_path / "busy.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1. machine_busy (the machine;" in said and "2. too_few_rows (the server;" in said
    assert "machine_busy comes first: what an override brings" in said


def test_json_has_what_the_page_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--evidence", str(RECORDED / "too_few_rows.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["findings"][0]
    assert first["cause"] == "too_few_rows"
    low, high = first["predicted_ratio"]
    assert 0.0 < low < high < 1.0
    assert first["replaces"] == [f"scheduler.max_requests={recorded('too_few_rows').engine.settings[MAX_REQUESTS]}"]
    assert set(found["meanings"]) <= set(first["evidence"])
    read = msgspec.convert(found, Findings).findings[0]  # by the engine's page
    assert [read.overrides, read.replaces, read.predicts] == [first[key] for key in PRINTED]


def test_a_server_that_does_not_say_what_it_runs_is_named(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", served.url]) == 1
    assert "expected an engine of this version" in capsys.readouterr().err


def test_causes_are_listed_by_branch_of_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--causes"]) == 0
    said = capsys.readouterr().out
    assert all(rule.cause in said and rule.branch in said for rule in RULES)


def test_rules_of_others_join_in(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--rules", f"{__name__}:MORE", "--evidence", str(RECORDED / "too_few_rows.json")]
    assert main(words) == 0
    assert "of_a_third_party" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--window", "0"], "--window"),
        (["--evidence", "a", "--record", "b"], "give one of them"),
        (["--evidence", "a", "--engine", "b"], "give one of them"),
        (["--evidence", "a", "--url", "http://127.0.0.1:9"], "give one of them"),
        (["--ledger", "/nowhere"], "--ledger /nowhere: no such file"),
        (["--evidence", "/nowhere"], "expected a file written by engine doctor --record"),
        (["--rules", "nowhere:RULES", "--causes"], "expected MODULE:NAME of a sequence of rules"),
        (["--rules", "math:pi", "--causes"], "expected MODULE:NAME of a sequence of rules"),
        (["--workload", "--rate 2"], "add --verify"),
        (["--pairs", "2"], "--pairs"),
    ],
)
def test_wrong_usage_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_of_several_engines_the_one_that_is_named_is_diagnosed(
    served_by_two: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    async def record(engine: LiveEngine, *_: object) -> Evidence:
        asked.append((await engine.json("/engine/stats"))["engine"])
        return recorded("too_few_rows")

    monkeypatch.setattr(doctor, "record", record)
    for words, said in (([], "a is one of 2 engines"), (["--engine", "b"], "b is one of 2 engines")):
        assert main(["doctor", "--url", served_by_two.url, *words]) == 0
        assert said in capsys.readouterr().err
    assert asked == ["a", "b"]
    assert main(["doctor", "--url", served_by_two.url, "--engine", "c"]) == 1
    assert "has no engine 'c'; it has a, b (--engine)" in capsys.readouterr().err


def test_the_only_engine_of_a_server_has_no_others(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--url", served.url])
    assert "--engine" not in capsys.readouterr().err


def test_an_engine_of_several_has_no_shadow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = recorded("too_few_rows")
    engine = msgspec.structs.replace(evidence.engine, id="replica-1", replicas=2)
    write(msgspec.structs.replace(evidence, engine=engine), str(tmp_path / "e.json"))
    words = ["doctor", "--evidence", str(tmp_path / "e.json"), "--verify", "--ledger", str(tmp_path / "ledger")]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "fleet.replicas=2" in shown.err and "replica-1 of 2 engines" in shown.out


def test_windows_of_few_requests_are_said_to_be_too_few(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    evidence = recorded("healthy-default-one-at-a-time")
    windows = [figures | {"requests": float(count)} for count, figures in enumerate(evidence.windows)]
    write(msgspec.structs.replace(evidence, windows=windows), str(tmp_path / "few.json"))
    assert main(["doctor", "--evidence", str(tmp_path / "few.json")]) == 0
    assert "0, 1, 2 requests ended in the windows, too few to judge" in " ".join(capsys.readouterr().out.split())
