"""Each rule fires when it should and not when it should not, by Prometheus and by the engine's own evaluation."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.needs import needs

from engine.counters.declared import SECONDS
from engine.counters.engine import EngineCounters
from engine_lab.alerts.evaluation import FIRING, OK, UNKNOWN, Evaluator
from engine_lab.alerts.history import History, scrape_of
from engine_lab.alerts.rules import Rule, RuleOptions, names, rules
from engine_lab.alerts.rules_file import rules_file
from engine_lab.alerts.slo import SLO_CLASSES
from engine_lab.alerts.terms import Term, increase
from engine_lab.shared.live import samples_of

from .scenarios import SCENARIOS, Scenario, Values

TABLE = rules(RuleOptions(rag=True))
TARGET = 'instance="a:1",job="engine",model="m",engine="default"'
needs_promtool = needs(lambda: "" if shutil.which("promtool") else "no promtool: Debian's package prometheus has it")


def rule_of(scenario: Scenario) -> Rule:
    (rule,) = [
        rule for rule in TABLE if rule.name == scenario.rule and rule.labels.get("window", "") == scenario.window
    ]
    return rule


def replayed(scenario: Scenario) -> tuple[History, str]:
    """What was seen, and the state of the rule at the end."""
    history, evaluator, state = History(), Evaluator([rule_of(scenario)]), ""
    for step, values in enumerate(zip(*scenario.series.values(), strict=True)):
        history.add(float(step * scenario.step_s), dict(zip(scenario.series, values)))
        (found,) = evaluator.evaluate(history)
        state = found.state
    return history, state


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda found: f"{found.rule}{found.window}: {found.name}")
def test_a_rule_fires_if_and_only_if_something_is_wrong(scenario: Scenario):
    _, state = replayed(scenario)
    assert (state == FIRING) == scenario.fires


def test_every_rule_is_seen_firing_and_silent():
    seen = {(scenario.rule, scenario.window, scenario.fires) for scenario in SCENARIOS}
    assert seen == {(rule.name, rule.labels.get("window", ""), fires) for rule in TABLE for fires in (True, False)}


@pytest.mark.parametrize("slo", SLO_CLASSES)
def test_limits_are_bounds_of_buckets_and_every_metric_is_exported(slo: str):
    table = rules(RuleOptions(slo=slo, rag=True))
    assert {SLO_CLASSES[slo].ttft_s, SLO_CLASSES[slo].itl_s} <= set(SECONDS)
    exported = scrape_of(samples_of(EngineCounters(4).readings()), names(table))
    assert names(table) == {series.partition("{")[0] for series in exported}
    asked = {text for rule in table for text in re.findall(r"engine_[a-z_]+\{[^}]+\}", rule.promql)}
    assert asked and asked <= exported.keys()


def test_a_burn_rate_that_no_share_of_late_requests_exceeds_is_left_out():
    table = rules(RuleOptions(objective=0.9))
    assert {rule.labels["window"] for rule in table if rule.name == "EngineTtftBurnRate"} == {"6h", "24h", "3d"}


def test_a_rule_of_which_nothing_is_known_does_not_fire():
    history = History()
    assert {found.state for found in Evaluator(TABLE).evaluate(history)} == {UNKNOWN}
    history.add(1.0, {"up": 1.0})
    found = Evaluator(TABLE, at_once=True).evaluate(history)
    assert {each.rule.name for each in found if each.state == OK} == {"EngineUnreachable"}
    assert {each.state for each in found} == {OK, UNKNOWN}


def test_history_is_bounded_and_still_reaches_back_three_days():
    history = History()
    for at_s in range(0, 4 * 86400, 15):
        history.add(float(at_s), {"a_total": float(at_s)})
    assert len(history._fine) + len(history._coarse) < 1000
    assert history.increase("a_total", 3 * 86400.0) == pytest.approx(3 * 86400, rel=1e-3)


def random_counters() -> Values:
    """With restarts and gaps, and some that begin late."""
    rng, found = random.Random(5), {}
    for number in range(6):
        value, values = rng.choice((0.0, 1e6)), []
        for _ in range(60):
            value = 0.0 if rng.random() < 0.05 else value + rng.choice((0, 0, 1, 7, 1000))
            values.append(math.nan if rng.random() < 0.2 else value)
        found[f"counter_{number}_total"] = [math.nan] * (5 * number) + values[5 * number :]
    return found


def group_of(series: Values, step_s: int, expected: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """Of promtool: PromQL and the samples that are expected at the end."""
    end = (min(map(len, series.values())) - 1) * step_s
    return {
        "interval": f"{step_s}s",
        "input_series": [
            {
                "series": (name[:-1] + f",{TARGET}}}") if name.endswith("}") else f"{name}{{{TARGET}}}",
                "values": " ".join("_" if math.isnan(value) else repr(float(value)) for value in values),
            }
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {"expr": expr, "eval_time": f"{end}s", "exp_samples": [{"labels": labels, "value": 1}] if labels else []}
            for expr, labels in expected
        ],
    }


def alert(scenario: Scenario) -> tuple[str, str]:
    rule = rule_of(scenario)
    labels = {"alertname": rule.name, "alertstate": "firing", "severity": rule.severity, **rule.labels}
    selector = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return (
        f"max without (engine,finish_reason,instance,job,model) (ALERTS{{{selector}}})",
        f"{{{selector}}}" if scenario.fires else "",
    )


def equals(term: Term, history: History) -> tuple[str, str]:
    """That Prometheus has the same value; older scrapes are thinned out here, which may change it a little."""
    value = term.value(history)
    if math.isnan(value):
        return f"{term.promql} >= 0", ""
    apart = 0.02 if any(window in term.promql for window in ("[2h]", "[6h]", "[24h]", "[3d]", "[1h]")) else 1e-9
    return f"vector(1) and on() (abs({term.promql} - {value!r}) <= {apart * max(1.0, abs(value))!r})", "{}"


def terms(rule: Rule) -> Iterator[Term]:
    for condition in rule.conditions:
        yield condition.left
        if isinstance(condition.right, Term):
            yield condition.right


@needs_promtool
@pytest.mark.slow
def test_prometheus_agrees_on_every_scenario_and_on_every_value(tmp_path: Path):
    (tmp_path / "rules.yml").write_text(rules_file(TABLE))
    checked = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0 and f"{len(TABLE)} rules found" in checked.stdout, checked.stderr
    files = []
    for number, scenario in enumerate(SCENARIOS):
        history, _ = replayed(scenario)
        expected = [alert(scenario), *(equals(term, history) for term in terms(rule_of(scenario)))]
        files.append(written(tmp_path / f"{number}.yml", scenario.step_s, scenario.series, iter(expected)))
    counters, history = random_counters(), History()
    for step, values in enumerate(zip(*counters.values(), strict=True)):
        history.add(step * 10.0, {name: value for name, value in zip(counters, values) if not math.isnan(value)})
    found = [equals(increase(name, window), history) for name in counters for window in ("1m", "5m", "30m")]
    files.append(written(tmp_path / "counters.yml", 10, counters, iter(found)))
    done = subprocess.run(["promtool", "test", "rules", *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def written(path: Path, step_s: int, series: Values, expected: Iterator[tuple[str, str]]) -> str:
    tests = [group_of(series, step_s, expected)]
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": f"{step_s}s", "tests": tests}))
    return path.name
