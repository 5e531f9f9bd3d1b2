"""The rules on evidence of real engines with planted faults."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.lab.doctor.cases import RECORDED, engine, recorded

from engine.assembly.compose import compose
from engine.assembly.discovery import discover
from engine_lab.doctor.diagnosis import diagnose
from engine_lab.doctor.evidence import Figures
from engine_lab.doctor.figures import MEANING
from engine_lab.doctor.rule import Remedy
from engine_lab.doctor.rules import RULES
from engine_lab.doctor.rules.queueing import more_rows_serve_more

FAULTS = sorted(
    file.stem for file in RECORDED.glob("*.json") if not file.stem.startswith("healthy") and file.stem != "host_gap"
)
HEALTHY = sorted(file.stem for file in RECORDED.glob("healthy*.json"))


@pytest.mark.parametrize("cause", FAULTS)
def test_the_planted_fault_is_named_first(cause: str) -> None:
    found = diagnose(recorded(cause), RULES).findings
    assert [finding.rule.cause for finding in found][:1] == [cause]


def test_a_device_that_waits_for_the_host_is_named_where_both_can_work_at_once() -> None:
    evidence = recorded("host_gap")  # of a CPU, whose cores the host takes from the step
    assert not diagnose(evidence, RULES).findings
    on_gpu = msgspec.structs.replace(evidence, engine=msgspec.structs.replace(evidence.engine, kind="cuda"))
    found = diagnose(on_gpu, RULES).findings
    assert found[0].rule.cause == "host_gap" and found[0].remedy.overrides == ("overlap=true",)


BUSY = {"waiting_for_core": 0.4, "others_cpus": 1.0, "stolen_share": 0.0, "cpus": 2.0}


@pytest.mark.parametrize("cause", ["drafter_does_not_pay", "too_few_rows"])
def test_a_busy_machine_comes_before_plugins_and_spoils_what_steps_cost(cause: str) -> None:
    evidence = recorded(cause)
    busy = msgspec.structs.replace(evidence, windows=[figures | BUSY for figures in evidence.windows])
    found = diagnose(busy, RULES)
    assert found.findings[0].rule.cause == "machine_busy" and not found.findings[0].remedy.overrides
    named = [finding.rule.cause for finding in found.findings[1:]]
    assert ("drafter_does_not_pay" in named, "too_few_rows" in named) == (False, cause == "too_few_rows")
    assert all(finding.remedy.is_trade for finding in found.findings if finding.rule.cause == "too_few_rows")
    quiet = diagnose(evidence, RULES).findings
    assert not any(finding.remedy.is_trade for finding in quiet)


@pytest.mark.parametrize("change", [{"waiting_for_core": 0.02}, {"others_cpus": 0.1}])
def test_an_engine_with_cores_of_its_own_is_not_on_a_busy_machine(change: dict[str, float]) -> None:
    evidence = recorded("drafter_does_not_pay")
    windows = [figures | BUSY | change for figures in evidence.windows]
    found = diagnose(msgspec.structs.replace(evidence, windows=windows), RULES).findings
    assert found[0].rule.cause == "drafter_does_not_pay"


def test_chunks_are_small_for_a_low_target_of_itl_as_well_as_for_a_small_budget() -> None:
    evidence = recorded("token_budget_too_small")
    settings = evidence.engine.settings | {"scheduler.token_budget": 2048, "scheduler.itl_target_ms": 2.0}
    engine = msgspec.structs.replace(evidence.engine, settings=settings)
    found = diagnose(msgspec.structs.replace(evidence, engine=engine), RULES).findings
    assert found[0].rule.cause == "token_budget_too_small"
    assert found[0].remedy.overrides == ("scheduler.itl_target_ms=50",)
    assert "ITL up to 50 ms" in found[0].remedy.pays


def judged(cause: str, figures: Figures, **settings: Any) -> Remedy | None:
    (rule,) = [rule for rule in RULES if rule.cause == cause]
    return rule.look(engine(**settings), figures)


def test_tokens_that_leave_one_by_one_and_arrive_together_were_collected_on_the_way() -> None:
    whole = {"probe_first_ms": 130.0, "probe_spread_ms": 1.0, "probe_decode_ms": 110.0}
    assert judged("proxy_buffers", whole)
    assert not judged("proxy_buffers", whole | {"probe_first_ms": 20.0, "probe_spread_ms": 110.0})


def test_a_client_is_slow_though_the_system_takes_all_that_it_does_not_read() -> None:
    figures = {"writing_ms": 20.0, "decode_ms": 1000.0}
    assert judged("slow_client", figures | {"unread_ms": 300.0})
    assert not judged("slow_client", figures | {"unread_ms": 0.0})


def test_a_target_for_itl_that_was_chosen_is_no_fault_of_long_prompts() -> None:
    chunked = {"chunks_mean": 12.0, "prompt_mean": 900.0, "cached_share": 0.0}
    assert not judged("token_budget_too_small", chunked, scheduler__itl_target_ms=50.0)
    low = judged("token_budget_too_small", chunked, scheduler__itl_target_ms=1.0)
    busy = judged("token_budget_too_small", chunked | BUSY, scheduler__itl_target_ms=1.0)
    assert low and busy and (low.is_trade, busy.is_trade) == (False, True)


def test_long_prompts_are_named_and_no_override_makes_one_class_pay_for_the_other() -> None:
    mixed = {
        "long_share": 0.3,
        "long_computed": 1850.0,
        "short_prompt": 60.0,
        "beside_max": 1850.0,
        "stalled_share": 0.8,
        "itl_p10_ms": 2.0,
        "itl_p50_ms": 5.0,
        "itl_p999_ms": 400.0,
    }
    limited = judged("long_prompt_among_short", mixed, scheduler__itl_target_ms=50.0)
    assert limited and not limited.overrides and limited.change == "without_long"
    free = judged("long_prompt_among_short", mixed)
    assert free and free.overrides == ("scheduler.itl_target_ms=60",) and not free.is_trade and "x 1.09" in free.pays
    assert not judged("long_prompt_among_short", mixed | {"itl_p999_ms": 20.0})


def test_stalls_beside_prompts_are_not_blamed_on_the_drafter() -> None:
    evidence = recorded("drafter_does_not_pay")
    stalled = [figures | {"itl_mean_ms": 10.0 * figures["itl_mean_ms"]} for figures in evidence.windows]
    found = diagnose(msgspec.structs.replace(evidence, windows=stalled), RULES).findings
    assert "drafter_does_not_pay" not in [finding.rule.cause for finding in found]


def test_costs_that_change_from_window_to_window_say_nothing_of_plugins() -> None:
    evidence = recorded("drafter_does_not_pay")
    evidence.windows[1] |= {"cost.base_ms": 10.0 * evidence.windows[1]["cost.base_ms"]}
    assert diagnose(evidence, RULES).findings == ()


def test_drafts_that_are_thrown_away_are_named_on_a_busy_machine_only_if_nearly_all_are() -> None:
    figures = {
        "drafted": 900.0,
        "accepted": 90.0,
        "chains": 400.0,
        "itl_count": 1000.0,
        "drafts_well_share": 0.0,
    }
    (rule,) = [rule for rule in RULES if rule.cause == "drafts_not_accepted"]
    ngram = engine({"drafter": "ngram"})
    assert rule.look(ngram, figures) and not rule.look(ngram, figures | BUSY)
    assert rule.look(ngram, figures | BUSY | {"drafted": 2400.0})
    assert not rule.look(ngram, figures | {"accepted": 400.0}) and not rule.look(ngram, figures | {"drafted": 120.0})
    some = rule.look(ngram, figures | {"drafts_well_share": 0.3})
    assert some and some.is_trade and "30% of requests" in some.pays


def test_a_row_that_decodes_costs_its_own_and_a_token() -> None:
    figures = {"rows": 4.0, "cost.base_ms": 10.0, "cost.per_token_ms": 1.0, "cost.per_row_ms": 0.0}
    assert more_rows_serve_more(figures)
    assert not more_rows_serve_more(figures | {"cost.per_row_ms": 4.0})


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_engine_has_no_finding(name: str) -> None:
    assert [finding.rule.cause for finding in diagnose(recorded(name), RULES).findings] == []


def test_every_proposed_override_is_one_of_this_engine() -> None:
    found = (finding for cause in FAULTS for finding in diagnose(recorded(cause), RULES).findings)
    discovered = discover()
    for overrides in {finding.remedy.overrides for finding in found}:
        compose(overrides, discovered)


def test_every_finding_has_an_override_or_advice() -> None:
    found = [finding for cause in FAULTS for finding in diagnose(recorded(cause), RULES).findings]
    assert all(finding.remedy.overrides or finding.remedy.advice for finding in found)


def test_rules_read_figures_that_exist_and_have_names_of_their_own() -> None:
    read = {name for rule in RULES for name in (rule.metric, *rule.shown, *rule.needs)}
    assert read <= set(MEANING)
    assert len({rule.cause for rule in RULES}) == len(RULES)


def test_evidence_holds_the_figures_that_are_documented() -> None:
    known = {name for cause in FAULTS for figures in recorded(cause).windows for name in figures}
    assert known <= set(MEANING)
