"""Entry of ``engine alerts``: a live server's metrics in, the rules that fire out."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import groupby

import aiohttp
from rich.console import Console
from rich.table import Table

from engine.contracts.command import INTERRUPTED, OK
from engine_lab.alerts import evaluation
from engine_lab.alerts.evaluation import Evaluator, Finding
from engine_lab.alerts.history import History, Scrape, scrape_of
from engine_lab.alerts.rules import Rule, RuleOptions, names, rules
from engine_lab.alerts.rules_file import rules_file
from engine_lab.alerts.terms import seconds
from engine_lab.shared.live import LiveEngine, LiveError, metrics_of

FIRES = 3
"""Exit code: something is wrong."""
TIMEOUT_S = 10.0
WORST_FIRST = (evaluation.FIRING, evaluation.PENDING, evaluation.OK, evaluation.UNKNOWN)
WINDOW = re.compile(r"\[(\w+)\]")
UNKNOWN = ""
"""The engine of a server that has not answered yet."""


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
    watched, end = Watched(table, at_once=True), time.monotonic() + flags.seconds
    async for at_s, scrapes in _scrapes(flags, names(table)):
        watched.add(at_s, scrapes)
        if at_s >= end:
            break
    findings = watched.evaluate()
    Console().print(render(findings, watched.histories))
    return FIRES if any(each.state == evaluation.FIRING for found in findings.values() for each in found) else OK


async def _watch(flags: argparse.Namespace, table: Sequence[Rule]) -> int:
    watched = Watched(table)
    before: dict[str, list[str]] = {}
    async for at_s, scrapes in _scrapes(flags, names(table)):
        watched.add(at_s, scrapes)
        findings = watched.evaluate()
        for engine, found in findings.items():
            for each, state in zip(found, before.get(engine, [evaluation.OK] * len(found)), strict=True):
                if _told(each) != state:
                    print(changed(each, engine if len(findings) > 1 else ""), flush=True)
        before = {engine: [_told(each) for each in found] for engine, found in findings.items()}
    raise AssertionError("scrapes do not end")


def _told(found: Finding) -> str:
    """Its state, for whom no data is no news."""
    return evaluation.OK if found.state == evaluation.UNKNOWN else found.state


class Watched:
    """What each engine of a server was, by its id, and which rules hold for it. Those of the server are the first
    engine's."""

    def __init__(self, table: Sequence[Rule], *, at_once: bool = False) -> None:
        """``at_once``: see :class:`Evaluator`."""
        self._table, self._at_once = table, at_once
        self.histories: dict[str, History] = {}
        self._evaluators: dict[str, Evaluator] = {}

    def add(self, at_s: float, scrapes: Mapping[str, Scrape]) -> None:
        """``scrapes``: of each engine; none: the server does not answer."""
        if UNKNOWN in self.histories and scrapes:  # it has never answered yet
            first = next(iter(scrapes))
            self.histories = {first: self.histories[UNKNOWN]}
            self._evaluators = {first: self._evaluators[UNKNOWN]}
        for engine in scrapes or self.histories or (UNKNOWN,):
            if engine not in self.histories:
                table = [rule for rule in self._table if not (rule.of_server and self.histories)]
                self.histories[engine] = History()
                self._evaluators[engine] = Evaluator(table, at_once=self._at_once)
            self.histories[engine].add(at_s, {"up": 1.0, **scrapes[engine]} if scrapes else {"up": 0.0})

    def evaluate(self) -> dict[str, list[Finding]]:
        return {engine: self._evaluators[engine].evaluate(history) for engine, history in self.histories.items()}


async def _scrapes(
    flags: argparse.Namespace, metrics: Collection[str]
) -> AsyncIterator[tuple[float, Mapping[str, Scrape]]]:
    """One of each engine every ``--every`` seconds. A server that does not answer is down, which is said once."""
    said = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        server = LiveEngine(session, flags.url, flags.api_key)
        while True:
            at_s = time.monotonic()
            try:
                engines = await server.fleet()
                found = await asyncio.gather(*[metrics_of(server.of(engine)) for engine in engines])
                yield at_s, {name: scrape_of(each, metrics) for name, each in zip(engines, found, strict=True)}
                said = ""
            except LiveError as error:
                if str(error) != said:
                    said = str(error)
                    print(f"engine alerts: {said}", file=sys.stderr)
                yield at_s, {}
            await asyncio.sleep(max(0.0, at_s + flags.every - time.monotonic()))


def changed(found: Finding, engine: str = "") -> str:
    """One line about a rule whose state is another; ``engine``: its id, where there are several."""
    rule = found.rule
    name = " ".join([rule.name, *rule.labels.values(), *filter(None, (engine,))])
    return f"{time.strftime('%H:%M:%S')} {found.state:7} {name} ({rule.severity}, {shown(found.value)}): {rule.summary}"


def render(findings: Mapping[str, Sequence[Finding]], histories: Mapping[str, History]) -> Table:
    """All rules, of several engines for each: those that fire with what may help, those that nearly do with what they
    lack. Those of one name, for several windows, share a row."""
    table = Table(box=None, pad_edge=False)
    several = len(findings) > 1
    for column in (*(("engine",) * several), "rule", "state", "value", "what"):
        table.add_column(column, overflow="fold")
    for engine, found in findings.items():
        for _, same in groupby(found, key=lambda each: each.rule.name):
            table.add_row(*((engine,) * several), *_cells(list(same), histories[engine]))
    return table


def _cells(same: Sequence[Finding], history: History) -> tuple[str, str, str, str]:
    """Of the worst; the rules of a name are in the order of how bad they are."""
    found = min(same, key=lambda each: WORST_FIRST.index(each.state))
    rule, fires = found.rule, found.state == evaluation.FIRING
    unmet = [each for each in rule.conditions[1:] if not each.holds(history)]
    near = f"not: {unmet[0].promql}" if unmet and rule.conditions[0].holds(history) else ""
    if found.state == evaluation.UNKNOWN:
        lacking = next(each for each in rule.conditions if not each.is_known(history))
        near = f"too little data: {lacking.promql} is {shown(lacking.left.value(history))}"
    if fires and any(seconds(window) > history.watched_s for window in WINDOW.findall(rule.promql)):
        near = f"(Watched for {history.watched_s:.0f} s: windows reach back no further.)"
    what = " ".join(filter(None, [f"{rule.summary} {rule.advice}" if fires else "", _windows(same), near]))
    state = f"[bold red]{found.state}[/] ({rule.severity})" if fires else found.state
    return rule.name, state, shown(found.value), what


def _windows(same: Sequence[Finding]) -> str:
    """Of several rules of a name: which windows are in which state."""
    if len(same) == 1:
        return ""
    states = groupby(same, key=lambda each: each.state)
    return "; ".join(f"{', '.join(each.rule.labels['window'] for each in some)}: {state}" for state, some in states)


def shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
