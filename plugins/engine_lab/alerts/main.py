"""Entry of ``engine alerts``: a live server's metrics in, the rules that fire out."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence

import aiohttp
from rich.console import Console
from rich.table import Table

from engine.contracts.command import INTERRUPTED, OK
from engine_lab.alerts import evaluation
from engine_lab.alerts.evaluation import Evaluator, Finding
from engine_lab.alerts.history import History, Scrape, scrape_of
from engine_lab.alerts.rules import Rule, RuleOptions, names, rules
from engine_lab.alerts.rules_file import rules_file
from engine_lab.shared.live import LiveEngine, LiveError, metrics_of

FIRES = 3
"""Exit code: something is wrong."""
TIMEOUT_S = 10.0


def run(flags: argparse.Namespace) -> int:
    """Run ``engine alerts`` with parsed flags; returns the exit status."""
    table = rules(RuleOptions(flags.slo, flags.objective, flags.rag, flags.job))
    if flags.rules:
        print(rules_file(table), end="")
        return OK
    try:
        return asyncio.run(_watch(flags, table) if flags.watch else _once(flags, table))
    except KeyboardInterrupt:
        return INTERRUPTED


async def _once(flags: argparse.Namespace, table: Sequence[Rule]) -> int:
    history, end = History(), time.monotonic() + flags.seconds
    async for at_s, scrape in _scrapes(flags, names(table)):
        history.add(at_s, scrape)
        if at_s >= end:
            break
    findings = Evaluator(table, at_once=True).evaluate(history)
    Console().print(render(findings, history))
    return FIRES if any(found.state == evaluation.FIRING for found in findings) else OK


async def _watch(flags: argparse.Namespace, table: Sequence[Rule]) -> int:
    history, evaluator = History(), Evaluator(table)
    before = [evaluation.OK] * len(table)
    async for at_s, scrape in _scrapes(flags, names(table)):
        history.add(at_s, scrape)
        findings = evaluator.evaluate(history)
        for found, state in zip(findings, before, strict=True):
            if found.state != state:
                print(changed(found), flush=True)
        before = [found.state for found in findings]
    raise AssertionError("scrapes do not end")


async def _scrapes(flags: argparse.Namespace, metrics: Collection[str]) -> AsyncIterator[tuple[float, Scrape]]:
    """One every ``--every`` seconds. A server that does not answer is down, which is said once."""
    said = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        engine = LiveEngine(session, flags.url, flags.api_key)
        while True:
            at_s = time.monotonic()
            try:
                yield at_s, {"up": 1.0, **scrape_of(await metrics_of(engine), metrics)}
                said = ""
            except LiveError as error:
                if str(error) != said:
                    said = str(error)
                    print(f"engine alerts: {said}", file=sys.stderr)
                yield at_s, {"up": 0.0}
            await asyncio.sleep(max(0.0, at_s + flags.every - time.monotonic()))


def changed(found: Finding) -> str:
    """One line about a rule whose state is another."""
    rule = found.rule
    labels = " ".join(rule.labels.values())
    name = f"{rule.name} {labels}" if labels else rule.name
    return f"{time.strftime('%H:%M:%S')} {found.state:7} {name} ({rule.severity}, {shown(found.value)}): {rule.summary}"


def render(findings: Sequence[Finding], history: History) -> Table:
    """All rules: those that fire with what may help, those that nearly do with what they lack."""
    table = Table(box=None, pad_edge=False)
    for column in ("rule", "state", "value", "what"):
        table.add_column(column, overflow="fold")
    for found in findings:
        rule, fires = found.rule, found.state == evaluation.FIRING
        unmet = [each for each in rule.conditions[1:] if not each.holds(history)]
        near = f"not: {unmet[0].promql}" if unmet and rule.conditions[0].holds(history) else ""
        what = f"{rule.summary} {rule.advice}" if fires else " ".join([*rule.labels.values(), near])
        state = f"[bold red]{found.state}[/] ({rule.severity})" if fires else found.state
        table.add_row(rule.name, state, shown(found.value), what)
    return table


def shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
