"""When a rule's suspicion becomes a finding, and in which order findings come."""

from __future__ import annotations

import pytest
from tests.lab.doctor.cases import engine, slow, windows

from engine_lab.doctor.diagnosis import diagnose
from engine_lab.doctor.evidence import Engine, Evidence, Figures
from engine_lab.doctor.rule import Remedy, Rule
from engine_lab.doctor.rules import RULES


def test_a_cause_that_all_windows_show_is_a_finding() -> None:
    (finding,) = diagnose(windows(200.0, 220.0, 240.0), [slow()]).findings
    assert finding.metric == pytest.approx(220.0)
    assert finding.evidence == {"ttft_p50_ms": [200.0, 220.0, 240.0]}


def test_two_windows_of_three_are_no_finding_and_the_abstention_names_them() -> None:
    found = diagnose(windows(200.0, 50.0, 240.0), [slow()])
    assert not found.findings
    assert found.abstentions[0].shown_in == (1, 3)


def test_a_window_with_too_few_requests_speaks_for_nothing() -> None:
    some = windows(200.0, 200.0, 200.0)
    some.windows[1]["requests"] = 1.0
    found = diagnose(some, [slow()])
    assert not found.findings
    assert found.abstentions[0].unknown_in == (2,)


def test_a_rule_whose_figures_no_window_has_is_not_judged() -> None:
    found = diagnose(windows(200.0, 200.0, 200.0), [slow(metric="itl_p50_ms")])
    assert not found.findings
    assert [rule.cause for rule in found.unknown] == ["slow"]


def test_findings_that_save_more_time_come_first() -> None:
    rules = [slow(saves=0.2, cause="less"), slow(saves=0.8, cause="more")]
    found = diagnose(windows(200.0, 200.0, 200.0), rules)
    assert [finding.rule.cause for finding in found.findings] == ["more", "less"]


def test_a_remedy_that_harms_a_class_comes_last_however_much_it_saves() -> None:
    def trade(engine: Engine, figures: Figures) -> Remedy:
        return Remedy(0.1, 0.2, ("overlap=true",), "", "short ones: ITL x 2", is_trade=True)

    rule = Rule("harms_some", "a branch", "It is slow.", "ttft_p50_ms", (), trade)
    found = diagnose(windows(200.0, 200.0, 200.0), [rule, slow(saves=0.2)]).findings
    assert [finding.rule.cause for finding in found] == ["slow", "harms_some"]


def test_the_predicted_range_holds_that_of_every_window() -> None:
    def look(engine: Engine, figures: Figures) -> Remedy:
        return Remedy(figures["ttft_p50_ms"] / 1000, figures["ttft_p50_ms"] / 1000 + 0.1)

    rule = Rule("slow", "a branch", "It is slow.", "ttft_p50_ms", (), look)
    (finding,) = diagnose(windows(300.0, 500.0, 400.0), [rule]).findings
    assert (finding.remedy.low, finding.remedy.high) == (0.3, 0.6)


def test_the_falsifier_is_the_worst_that_was_predicted() -> None:
    (finding,) = diagnose(windows(200.0, 200.0, 200.0), [slow()]).findings
    assert "does not fall below 180 " in finding.falsifier


def test_without_load_nothing_is_found() -> None:
    idle = Evidence(engine(), [{"seconds": 1.0, "requests": 0.0}] * 3)
    found = diagnose(idle, RULES)
    assert not found.findings
    assert not found.abstentions


def test_a_time_for_each_token_is_saved_by_each_token() -> None:
    some = windows(200.0, 200.0, 200.0)
    for figures in some.windows:
        figures |= {"itl_p50_ms": 20.0, "output_mean": 101.0}
    rules = [slow(saves=0.5), slow(10.0, saves=0.5, metric="itl_p50_ms", cause="each_token")]
    found = diagnose(some, rules).findings
    assert [finding.rule.cause for finding in found] == ["each_token", "slow"]
    assert found[0].saved_ms == pytest.approx(20.0 * 100 * (1 - (0.5 + 0.9) / 2))


def test_lost_requests_come_before_slow_ones_and_save_no_time() -> None:
    some = windows(200.0, 200.0, 200.0)
    for figures in some.windows:
        figures["rejected"] = 12.0
    found = diagnose(some, [slow(), slow(3.0, metric="rejected", cause="lost")]).findings
    assert [(finding.rule.cause, finding.saved_ms > 0) for finding in found] == [("lost", False), ("slow", True)]


def test_a_rule_of_a_third_party_that_predicts_no_gain_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"expected less than 1"):
        diagnose(windows(200.0, 200.0, 200.0), [slow(saves=-0.5)])
