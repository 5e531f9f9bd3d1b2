"""From evidence to findings: a rule speaks only if all windows show its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from engine_lab.doctor.evidence import Evidence, Figures
from engine_lab.doctor.figures import decode_row_ms
from engine_lab.doctor.rule import Remedy, Rule

STEADY = 2.0
"""Highest fitted cost of a decode step / the lowest, over the windows: beyond, it says nothing of plugins."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that every window shows."""

    rule: Rule
    remedy: Remedy
    """Of the last window, with the widest range of all."""
    metric: float
    """Mean over the windows."""
    times: float
    """How often a request pays the metric, on average."""
    evidence: dict[str, list[float]]
    """The rule's figures, by window."""

    @property
    def saved_ms(self) -> float:
        """For each request, at the middle of the predicted range; 0 where the metric is no time."""
        if not self.rule.is_time:
            return 0.0
        return self.times * self.metric * (1.0 - (self.remedy.low + self.remedy.high) / 2)

    @property
    def predicts(self) -> str:
        low, high = self.metric * self.remedy.low, self.metric * self.remedy.high
        return f"{self.rule.metric} of {low:.4g}-{high:.4g} instead of {self.metric:.4g}"

    @property
    def falsifier(self) -> str:
        metric, limit = self.rule.metric, self.metric * self.remedy.high
        return (
            f"if {metric} under the same load does not fall below {limit:.4g} after the change, this was not the cause"
        )


@dataclass(frozen=True, slots=True)
class Abstention:
    """A cause that some windows show and others do not."""

    rule: Rule
    shown_in: tuple[int, ...]
    """Windows, from 1."""
    unknown_in: tuple[int, ...]
    """Windows that lack what the rule needs."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """What may be the cause of the others first, then lost requests, then the most time saved for each request; last
    those whose remedy harms a class of requests."""
    abstentions: tuple[Abstention, ...]
    unknown: tuple[Rule, ...]
    """Rules that no window had enough figures for."""


def diagnose(evidence: Evidence, rules: Sequence[Rule]) -> Diagnosis:
    findings, abstentions, unknown = [], [], []
    steady = costs_are_steady(evidence.windows)
    for rule in rules:
        known = [rule.can_judge(figures) and (steady or not rule.reads_costs) for figures in evidence.windows]
        remedies = [
            rule.look(evidence.engine, figures) if judged else None
            for figures, judged in zip(evidence.windows, known, strict=True)
        ]
        shown = [remedy for remedy in remedies if remedy is not None]
        if shown and len(shown) == len(remedies):
            findings.append(_finding(rule, evidence, shown))
        elif shown:
            shown_in = tuple(number for number, remedy in enumerate(remedies, 1) if remedy is not None)
            abstentions.append(Abstention(rule, shown_in, tuple(n for n, judged in enumerate(known, 1) if not judged)))
        elif not any(known):
            unknown.append(rule)
    findings.sort(key=_place)
    return Diagnosis(tuple(findings), tuple(abstentions), tuple(unknown))


def _place(finding: Finding) -> tuple[bool, bool, bool, float]:
    rule = finding.rule
    return not rule.comes_first, finding.remedy.is_trade, rule.is_time, -finding.saved_ms


def costs_are_steady(windows: Sequence[Figures]) -> bool:
    """Whether the fit of the step cost found the same in all windows, for one decode step."""
    rows = fmean(figures.get("rows", 1.0) for figures in windows)
    costs = [
        figures["cost.base_ms"] + rows * decode_row_ms(figures) for figures in windows if "cost.base_ms" in figures
    ]
    return not costs or max(costs) <= STEADY * min(costs)


def _finding(rule: Rule, evidence: Evidence, remedies: Sequence[Remedy]) -> Finding:
    windows = evidence.windows
    last = remedies[-1]
    low, high = min(remedy.low for remedy in remedies), max(remedy.high for remedy in remedies)
    return Finding(
        rule,
        replace(last, low=low, high=high, is_trade=any(remedy.is_trade for remedy in remedies)),
        fmean(figures[rule.metric] for figures in windows),
        fmean(_times(rule.metric, figures) for figures in windows),
        {name: [figures[name] for figures in windows] for name in rule.shown},
    )


def _times(metric: str, figures: Figures) -> float:
    """How often a request pays ``metric``."""
    if metric == "itl_p999_ms":  # once, if another's prompt came between its tokens
        return figures.get("stalled_share", 0.0)
    return max(0.0, figures.get("output_mean", 1.0) - 1.0) if metric.startswith("itl_") else 1.0
