"""Which rules fire now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_lab.alerts.history import History
from engine_lab.alerts.rules import Rule
from engine_lab.alerts.terms import seconds

OK, PENDING, FIRING, UNKNOWN = "ok", "pending", "firing", "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one rule."""

    rule: Rule
    state: str
    """``ok``; ``pending``: it holds, but not for long enough; ``firing``; ``unknown``: there is too little data."""
    value: float
    since_s: float
    """When it began to hold, on the clock of the history."""


class Evaluator:
    """Remembers since when each rule holds."""

    def __init__(self, rules: Sequence[Rule], *, at_once: bool = False) -> None:
        """``at_once``: a rule that holds fires, however short."""
        self._rules, self._at_once = rules, at_once
        self._since: dict[int, float] = {}

    def evaluate(self, history: History) -> list[Finding]:
        """In the order of the rules."""
        return [self._judge(number, rule, history) for number, rule in enumerate(self._rules)]

    def _judge(self, number: int, rule: Rule, history: History) -> Finding:
        value, now_s = rule.value(history), history.now_s
        if not rule.holds(history):
            self._since.pop(number, None)
            return Finding(rule, OK if rule.is_known(history) else UNKNOWN, value, now_s)
        since_s = self._since.setdefault(number, now_s)
        fires = self._at_once or now_s - since_s >= seconds(rule.lasting)
        return Finding(rule, FIRING if fires else PENDING, value, since_s)
