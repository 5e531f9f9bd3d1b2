"""Predictions, what came of them, and the shadow engine that tells."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.lab.doctor.cases import RECORDED, recorded, slow, windows

from engine.assembly.assemble import assemble
from engine.assembly.compose import compose
from engine.assembly.discovery import discover
from engine_lab.doctor import ledger, shadow
from engine_lab.doctor.diagnosis import diagnose
from engine_lab.doctor.evidence import engine_of
from engine_lab.doctor.rules import RULES
from engine_lab.shared.statistics import Estimate, Interval


def entry(value: float, low: float, high: float) -> ledger.Entry:
    """Of a finding that predicts 0.5 to 0.9."""
    evidence = windows(200.0, 200.0, 200.0)
    (finding,) = diagnose(evidence, [slow()]).findings
    return ledger.entry_of(finding, evidence, Estimate(value, Interval(low, high), 6))


def test_an_estimate_within_the_predicted_range_is_a_hit_if_something_has_become_better() -> None:
    assert entry(0.7, 0.4, 0.98).outcome == ledger.HIT
    assert entry(0.7, 0.4, 1.2).outcome == ledger.UNDECIDED


def test_an_interval_outside_of_the_predicted_range_is_a_miss() -> None:
    assert entry(1.1, 0.95, 1.3).outcome == ledger.MISS


def test_an_estimate_outside_whose_interval_reaches_in_is_undecided() -> None:
    assert entry(0.95, 0.85, 1.05).outcome == ledger.UNDECIDED


def test_the_ledger_keeps_entries_and_says_how_many_were_right(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    for each in (entry(0.7, 0.6, 0.8), entry(0.8, 0.7, 0.9), entry(1.1, 0.95, 1.3)):
        ledger.append(file, each)
    assert [each.outcome for each in ledger.read(file)] == ["hit", "hit", "miss"]
    last = list(ledger.score(ledger.read(file)))[-1]
    assert last.startswith("2 of 3 named the right cause: 67% [21%-94%]")


def test_more_than_was_predicted_is_the_right_cause(tmp_path: Path) -> None:
    larger = entry(0.02, 0.01, 0.04)
    assert larger.outcome == ledger.LARGER
    said = list(ledger.score([larger, entry(1.1, 0.95, 1.3)]))
    assert "right cause, effect larger than predicted" in said[1]
    assert said[-1].startswith("1 of 2 named the right cause") and "1 of them with an effect larger" in said[-1]


def test_a_ledger_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="expected a file written by engine doctor --verify"):
        ledger.read(file)


def test_a_shadow_is_set_up_like_the_engine() -> None:
    evidence = recorded("too_few_rows")
    composed = compose(shadow.overrides_of(evidence.engine), discover())
    assert composed.tree()["scheduler"]["max_requests"] == evidence.engine.settings["scheduler.max_requests"]


def test_every_override_that_is_proposed_makes_a_shadow() -> None:
    proposed = set[tuple[str, ...]]()
    for file in RECORDED.glob("*.json"):
        evidence = recorded(file.stem)
        for finding in diagnose(evidence, RULES).findings:
            words = shadow.overrides_of(evidence.engine, finding.remedy.overrides)
            assert set(finding.remedy.overrides) <= set(words)
            proposed.add(tuple(words))
    discovered = discover()
    for words in proposed:
        compose(words, discovered)


def test_a_shadow_has_every_setting_of_the_engines_slots() -> None:
    words = ("model.dtype=bfloat16", "drafter=ngram", "parallelism.tp=2", "attention_kernel=torch", "threads=1")
    plan = msgspec.to_builtins(assemble(words))
    told = dict.fromkeys(("max_len", "kv_tokens", "weights_bytes", "kv_bytes"), 1) | {"lowering": []}
    engine = engine_of({"id": "replica-1", "plan": plan | {"settings": plan["settings"]}, "engine": told})
    shadows = assemble(shadow.overrides_of(engine))
    assert shadows.dtype == "bfloat16" and shadows.layout.tp == 2 and shadows.settings.threads == 1
    assert shadows.choice("drafter").config == assemble(words).choice("drafter").config
    assert shadows.choice("attention_kernel").name == "torch"


def test_the_shadows_load_is_like_the_one_that_was_seen() -> None:
    evidence = recorded("too_few_rows")
    options = shadow.options_of(shadow.workload_of(evidence, 24), 6)
    assert options.concurrency == 8
    assert options.rate is None
    assert 60 <= int(str(options.prompt_tokens)) <= 90


def test_flags_that_the_load_does_not_have_are_named() -> None:
    with pytest.raises(ValueError, match="--nonsense"):
        shadow.options_of("--nonsense 3", 6)
