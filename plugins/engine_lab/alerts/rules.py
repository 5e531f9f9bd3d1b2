"""The rules: what is wrong with an engine, from its metrics. The Prometheus rules file, ``engine alerts`` and exporter
``webhook`` all come from this table.

Burn rates over several windows: Site Reliability Workbook, chapter 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.counters import declared
from engine_lab.alerts.history import History
from engine_lab.alerts.slo import SLO_CLASSES
from engine_lab.alerts.terms import (
    Condition,
    Term,
    gauge,
    increase,
    quantile,
    ratio,
    share_above,
)

PAGE, TICKET = "page", "ticket"
MIN_REQUESTS, MIN_TOKENS, MIN_CHAINS = 100, 1000, 1000
"""In a rule's shortest window: fewer say nothing."""
BURNS = (("1h", "5m", 14.4, PAGE), ("6h", "30m", 6.0, PAGE), ("24h", "2h", 3.0, TICKET), ("3d", "6h", 1.0, TICKET))
"""Long and short window, and how many times faster than allowed the share of late ones is used up in both."""


@dataclass(frozen=True, slots=True)
class Rule:
    """All conditions hold for ``lasting``: it fires."""

    name: str
    severity: str
    summary: str
    advice: str
    conditions: tuple[Condition, ...]
    lasting: str = "0s"
    labels: dict[str, str] = field(default_factory=dict)
    of_server: bool = False
    """It is of the server, however many engines there are."""

    @property
    def promql(self) -> str:
        return " and ".join(condition.promql for condition in self.conditions)

    def holds(self, history: History) -> bool:
        return all(condition.holds(history) for condition in self.conditions)

    def is_known(self, history: History) -> bool:
        """Whether there is enough data to say that it does not hold."""
        return all(condition.is_known(history) for condition in self.conditions)

    def value(self, history: History) -> float:
        """What the first condition compares; NaN where nothing is known."""
        return self.conditions[0].left.value(history)


@dataclass(frozen=True, slots=True)
class RuleOptions:
    slo: str = "chat"
    """One of :data:`SLO_CLASSES`."""
    objective: float = 0.99
    """Share of requests, and of tokens, that should keep its limits."""
    rag: bool = False
    """Prompts share most of their text: the prefix cache should find it."""
    job: str = "engine"
    """The name of Prometheus' scrape job."""


def rules(options: RuleOptions) -> list[Rule]:
    return [*_latency(), *_burn_rates(options), *_resources(options), *_operation(options)]


def names(table: Iterable[Rule]) -> frozenset[str]:
    """Metrics that they read."""
    return frozenset(name for rule in table for name in re.findall(r"engine_[a-z_]+", rule.promql))


def _latency() -> Iterator[Rule]:
    ttft = declared.TTFT
    p50, enough = quantile(0.5, ttft, "30m"), Condition(increase(ttft.count, "5m"), ">=", MIN_REQUESTS, is_minimum=True)
    yield Rule(
        "EngineTtftTail",
        TICKET,
        "P95 of TTFT over 5 minutes is above twice its P50 over 30 minutes.",
        "The prefix cache misses, requests queue up, or a few prompts are much longer than the others.",
        (Condition(quantile(0.95, ttft, "5m"), ">", p50.times(2)), enough),
        "1m",
    )
    yield Rule(
        "EngineTtftShift",
        TICKET,
        "P50 of TTFT over 5 minutes is above 1.5 times that over 30 minutes.",
        "Load, prompt lengths or cache hits have changed.",
        (Condition(quantile(0.5, ttft, "5m"), ">", p50.times(1.5)), enough),
        "1m",
    )


def _burn_rates(options: RuleOptions) -> Iterator[Rule]:
    slo, budget = SLO_CLASSES[options.slo], 1.0 - options.objective
    for name, histogram, limit_s, minimum in (
        ("TTFT", declared.TTFT, slo.ttft_s, MIN_REQUESTS),
        ("ITL", declared.ITL, slo.itl_s, MIN_TOKENS),
    ):
        for long, short, factor, severity in BURNS:
            most = factor * budget
            if most >= 1.0:
                continue  # not all can be more than late
            yield Rule(
                f"Engine{name.capitalize()}BurnRate",
                severity,
                f"{name} exceeds {limit_s:g} s {factor:g} times as often as the objective allows.",
                f"More than {most:.3%} were late over {long} and over {short}; the objective of class {options.slo} "
                f"allows {budget:.3%}.",
                (
                    Condition(share_above(histogram, limit_s, long), ">", most),
                    Condition(share_above(histogram, limit_s, short), ">", most),
                    Condition(increase(histogram.count, short), ">=", minimum, is_minimum=True),
                ),
                labels={"slo": options.slo, "window": long},
            )


def _resources(options: RuleOptions) -> Iterator[Rule]:
    yield Rule(
        "EngineKvFull",
        TICKET,
        "The KV cache is more than 90 % in use and requests wait.",
        "Quantize keys and values or weights, limit max_tokens, or add an engine.",
        (Condition(gauge(declared.KV_USED), ">", 0.9), Condition(gauge(declared.REQUESTS_WAITING), ">", 0)),
        "2m",
    )
    if options.rag:
        queries = declared.PREFIX_CACHE_QUERIES
        yield Rule(
            "EnginePrefixHitsLow",
            TICKET,
            "Less than 60 % of prompt tokens were found in the prefix cache over 30 minutes.",
            "Put what prompts share first; GET /engine/requests/ID says where a prompt began to differ.",
            (
                Condition(ratio(declared.PREFIX_CACHE_HITS, queries, "30m"), "<", 0.6),
                Condition(increase(queries.name, "30m"), ">=", MIN_TOKENS, is_minimum=True),
            ),
        )
    chains = declared.DRAFT_CHAINS
    yield Rule(
        "EngineAcceptanceLow",
        TICKET,
        "Fewer than 0.5 draft tokens are accepted per verification over 30 minutes.",
        "The drafter does not fit the model or the text: try another, or drafter=none.",
        (
            Condition(ratio(declared.ACCEPTED_TOKENS, chains, "30m"), "<", 0.5),
            Condition(increase(chains.name, "30m"), ">=", MIN_CHAINS, is_minimum=True),
        ),
    )


def _operation(options: RuleOptions) -> Iterator[Rule]:
    up = Term(f'up{{job="{options.job}"}}', lambda history: history.latest("up"))
    yield Rule(
        "EngineUnreachable",
        PAGE,
        "The server does not answer at /metrics.",
        "Is it running, and does the scrape have its API key?",
        (Condition(up, "==", 0),),
        "1m",
        of_server=True,
    )
    failed = increase(declared.REQUESTS.series("error"), "5m")
    yield Rule(
        "EngineRequestsFailed",
        TICKET,
        "Requests ended with an error over 5 minutes.",
        "The server's log says which.",
        (Condition(failed, ">", 0),),
    )
    dropped = increase(declared.DROPPED_EVENTS.name, "5m")
    yield Rule(
        "EngineEventsDropped",
        TICKET,
        "Events were dropped over 5 minutes: metrics count too little.",
        "An exporter is too slow.",
        (Condition(dropped, ">", 0),),
    )
