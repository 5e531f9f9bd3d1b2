"""A diagnosis for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from engine_lab.doctor.classes import in_words, p95s
from engine_lab.doctor.diagnosis import Diagnosis, Finding
from engine_lab.doctor.evidence import Evidence
from engine_lab.doctor.figures import MEANING
from engine_lab.doctor.rule import Rule

SCHEMA = "engine-doctor/1"
FEWEST = 3
"""Requests of a window with which most rules can judge it."""


def causes(rules: Sequence[Rule]) -> str:
    """A line for each cause, by branch of the tree."""
    lines = []
    for branch in dict.fromkeys(rule.branch for rule in rules):
        lines.append(f"{branch}\n")
        lines += [f"  {rule.cause:24} {rule.says}\n" for rule in rules if rule.branch == branch]
    return "".join(lines)


def document(diagnosis: Diagnosis, evidence: Evidence) -> dict[str, Any]:
    """As JSON."""
    return {
        "schema": SCHEMA,
        "findings": [
            {
                "cause": finding.rule.cause,
                "branch": finding.rule.branch,
                "where": finding.rule.where,
                "says": finding.rule.says,
                "evidence": finding.evidence,
                "overrides": finding.remedy.overrides,
                "replaces": replaced(finding, evidence),
                "advice": finding.remedy.advice,
                "pays": finding.remedy.pays,
                "is_trade": finding.remedy.is_trade,
                "metric": finding.rule.metric,
                "before": finding.metric,
                "predicted_ratio": [finding.remedy.low, finding.remedy.high],
                "predicts": finding.predicts + (f"; paid by {finding.remedy.pays}" if finding.remedy.pays else ""),
                "saved_ms": finding.saved_ms,
                "falsifier": finding.falsifier,
            }
            for finding in diagnosis.findings
        ],
        "abstentions": [
            {"cause": each.rule.cause, "shown_in": each.shown_in, "unknown_in": each.unknown_in}
            for each in diagnosis.abstentions
        ],
        "meanings": {name: MEANING[name] for each in diagnosis.findings for name in each.evidence if MEANING.get(name)},
        "notes": list(notes(diagnosis, evidence)),
        "not_judged": [rule.cause for rule in diagnosis.unknown],
        "p95_ms": p95s(evidence.requests),
        "until": evidence.taken,
        "windows_s": [figures["seconds"] for figures in evidence.windows],
        "requests": [figures.get("requests", 0.0) for figures in evidence.windows],
    }


def replaced(finding: Finding, evidence: Evidence) -> list[str]:
    """What the engine has instead of a finding's overrides, as far as it is known."""
    now = (evidence.engine.now(override) for override in finding.remedy.overrides)
    return [each for each in now if each is not None]


def notes(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[str]:
    """What there is to say beside findings."""
    windows = evidence.windows
    for each in diagnosis.abstentions:
        shown = " and ".join(map(str, each.shown_in))
        why = f"seen in window {shown} of {len(windows)} only"
        if each.unknown_in:
            why += f", {' and '.join(map(str, each.unknown_in))} had too few samples"
        yield f"abstained: {each.rule.cause}: {why}"
    first, *others = diagnosis.findings or (None,)
    if first is not None and first.rule.comes_first and others:
        yield (
            f"{first.rule.cause} comes first: what an override brings, and who pays, can be something else once it is "
            "mended; look again then"
        )
    requests = [figures.get("requests", 0.0) for figures in windows]
    if min(requests) < FEWEST:
        ended = ", ".join(f"{count:g}" for count in requests)
        yield f"{ended} requests ended in the windows, too few to judge: send more, or make them longer (--window)"


def render(diagnosis: Diagnosis, evidence: Evidence) -> Group:
    return Group(*_lines(diagnosis, evidence))


def _lines(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[Text]:
    windows = evidence.windows
    requests = ", ".join(f"{figures.get('requests', 0):g}" for figures in windows)
    watched = f"{len(windows)} windows of {windows[0]['seconds']:.3g} s, {requests} requests"
    if evidence.taken:
        watched += f", until {evidence.taken}"
    engine = evidence.engine
    which = "" if engine.replicas == 1 else f", {engine.id} of {engine.replicas} engines"
    yield Text(f"{engine.model} on {engine.device}{which}; {watched}")
    if not diagnosis.findings:
        yield Text("no finding", style="bold")
    for number, finding in enumerate(diagnosis.findings, 1):
        yield from _finding(number, finding, replaced(finding, evidence))
    if latencies := p95s(evidence.requests):
        yield Text(f"\nP95 in ms of each class: {in_words(latencies)}", style="dim")
    for note in notes(diagnosis, evidence):
        yield Text(note, style="dim")


def _finding(number: int, finding: Finding, instead_of: Sequence[str]) -> Iterator[Text]:
    rule, remedy = finding.rule, finding.remedy
    yield Text.assemble("\n", (f"{number}. {rule.cause}", "bold"), f"  ({rule.where}; {rule.branch})")
    yield Text(f"   {rule.says}")
    values = ", ".join(f"{name} {'/'.join(f'{v:.4g}' for v in found)}" for name, found in finding.evidence.items())
    yield Text(f"   evidence: {values}", style="dim")
    if remedy.overrides:
        now = f"  (now {' '.join(instead_of)})" if instead_of else ""
        name = "trade:   " if remedy.is_trade else "override:"
        yield Text.assemble(f"   {name} ", (" ".join(remedy.overrides), "bold cyan"), now)
    if remedy.advice:
        yield Text(f"   advice:   {remedy.advice}")
    yield Text(f"   predicts: {finding.predicts}")
    if remedy.overrides:
        yield Text(f"   pays:     {remedy.pays or 'no class of requests'}")
    yield Text(f"   {finding.falsifier}")
