"""What each rule is for, and what comes close to it and is none of its business: as metrics over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_lab.alerts.rules import BURNS
from engine_lab.alerts.terms import seconds

BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, math.inf)
Values = Mapping[str, Sequence[float]]
"""By series, at the start and after each step."""


@dataclass(frozen=True)
class Scenario:
    name: str
    rule: str
    fires: bool
    step_s: int
    series: Values
    window: str = ""
    """The label of the rule, for those of which there are several."""


def summed(steps: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(steps)]


def histogram(name: str, steps: Sequence[Mapping[float, float]]) -> dict[str, list[float]]:
    """Observations of each step: how many by value."""

    def below(bound: float) -> list[float]:
        return summed([sum(count for value, count in step.items() if value <= bound) for step in steps])

    buckets = {("+Inf" if math.isinf(bound) else repr(bound)): below(bound) for bound in BOUNDS}
    found = {f'engine_{name}_seconds_bucket{{le="{bound}"}}': counts for bound, counts in buckets.items()}
    return found | {f"engine_{name}_seconds_count": buckets["+Inf"]}


def _latency() -> list[Scenario]:
    fast, slow = {0.15: 40.0}, {0.9: 40.0}
    tail, few = {0.15: 35.0, 0.9: 5.0}, {0.15: 9.0, 0.9: 2.0}
    return [
        Scenario(name, rule, fires, 60, histogram("ttft", [early] * 25 + [late] * 8))
        for name, rule, fires, early, late in (
            ("an eighth became slow", "EngineTtftTail", True, fast, tail),
            ("all stayed fast", "EngineTtftTail", False, fast, fast),
            ("a fifth of a few became slow", "EngineTtftTail", False, few, few),
            ("all became slow", "EngineTtftShift", True, fast, slow),
            ("an eighth became slow", "EngineTtftShift", False, fast, tail),
            ("a few became slow", "EngineTtftShift", False, few, {0.9: 11.0}),
            ("all were slow all the time", "EngineTtftShift", False, slow, slow),
        )
    ]


def _burn_rates() -> list[Scenario]:
    """Of the class ``chat`` with an objective of 99 %."""
    found = []
    for metric, in_time, late in (("ttft", 0.15, 0.9), ("itl", 0.05, 0.2)):
        for long, short, factor, _ in BURNS:
            step_s = int(seconds(short)) // 10
            steps = int(seconds(long)) // step_s

            def step(share: float, in_time: float = in_time, late: float = late) -> dict[float, float]:
                return {in_time: 1000 * (1 - share), late: 1000 * share}

            much, little = step(0.015 * factor), step(0.005 * factor)
            rule = f"Engine{metric.capitalize()}BurnRate"
            for name, fires, days in (
                ("more than allowed are late", True, [much] * steps),
                ("fewer are late", False, [little] * steps),
                ("that is over", False, [much] * (steps - 11) + [little] * 11),
                ("it has begun just now", False, [step(0)] * (steps - 11) + [much] * 11),
                ("hardly anybody came", False, [{late: 0.9}] * steps),
            ):
                found.append(Scenario(name, rule, fires, step_s, histogram(metric, days), long))
    return found


def _others() -> list[Scenario]:
    def counters(per_step: Mapping[str, float], steps: int = 31) -> dict[str, list[float]]:
        return {series: summed([each] * steps) for series, each in per_step.items()}

    def gauges(values: Mapping[str, float]) -> dict[str, list[float]]:
        return {series: [value] * 5 for series, value in values.items()}

    kv, waiting = "engine_kv_used_ratio", "engine_requests_waiting"
    hits, queries = "engine_prefix_cache_hits_total", "engine_prefix_cache_queries_total"
    accepted, chains = "engine_accepted_tokens_total", "engine_draft_chains_total"
    failed, dropped = 'engine_requests_total{finish_reason="error"}', "engine_dropped_events_total"
    return [
        Scenario(name, rule, fires, 60, series)
        for name, rule, fires, series in (
            ("full, and some wait", "EngineKvFull", True, gauges({kv: 0.95, waiting: 3})),
            ("full, and nobody waits", "EngineKvFull", False, gauges({kv: 0.95, waiting: 0})),
            ("some wait, and there is room", "EngineKvFull", False, gauges({kv: 0.9, waiting: 3})),
            ("full for a moment", "EngineKvFull", False, {kv: [0.5, 0.5, 0.5, 0.99], waiting: [3] * 4}),
            ("half is found", "EnginePrefixHitsLow", True, counters({hits: 500, queries: 1000})),
            ("most is found", "EnginePrefixHitsLow", False, counters({hits: 700, queries: 1000})),
            ("few prompts came", "EnginePrefixHitsLow", False, counters({hits: 5, queries: 10})),
            ("few drafts are accepted", "EngineAcceptanceLow", True, counters({accepted: 40, chains: 100})),
            ("drafts are accepted", "EngineAcceptanceLow", False, counters({accepted: 60, chains: 100})),
            ("there were few drafts", "EngineAcceptanceLow", False, counters({accepted: 0, chains: 20})),
            ("it is away", "EngineUnreachable", True, gauges({"up": 0})),
            ("it answers", "EngineUnreachable", False, gauges({"up": 1})),
            ("one failed", "EngineRequestsFailed", True, {failed: [4, 4, 4, 5]}),
            ("none failed lately", "EngineRequestsFailed", False, {failed: [4, 5, *[5] * 7]}),
            ("some were dropped", "EngineEventsDropped", True, {dropped: [0, 0, 12, 12]}),
            ("none were", "EngineEventsDropped", False, {dropped: [12, 12, 12, 12]}),
        )
    ]


SCENARIOS = (*_latency(), *_burn_rates(), *_others())
