"""Schedulers."""

from __future__ import annotations

import itertools
from typing import Any

from engine.contracts.scheduler import Schedule, ScheduledRow
from engine_plugins.scheduler.continuous import ContinuousScheduler


class PlansList(ContinuousScheduler):
    """Returns rows without a Schedule."""

    says = r"plan\(\) returned \[.*, expected a Schedule"

    def plan(self, view: Any) -> Any:
        return list(super().plan(view).rows)


class PlansNothing(ContinuousScheduler):
    """Returns ``None``."""

    says = r"plan\(\) returned None, expected a Schedule"

    def plan(self, view: Any) -> Any:
        return None


class OneRow(ContinuousScheduler):
    """``rows`` is a row."""

    says = r"plan\(\) returned .*expected rows and preempt_order as tuples"

    def plan(self, view: Any) -> Any:
        return Schedule(super().plan(view).rows[0])  # type: ignore[arg-type]


class Names(ContinuousScheduler):
    """Rows are names of requests."""

    says = r"plan\(\) returned a row 'warm-up-0', expected a ScheduledRow"

    def plan(self, view: Any) -> Any:
        return Schedule(tuple(row.request_id for row in super().plan(view).rows))  # type: ignore[misc]


class Twice(ContinuousScheduler):
    """Gives a request two rows."""

    says = r"plan\(\) returned a row for request 'warm-up-0', which has one already"

    def plan(self, view: Any) -> Any:
        return Schedule(super().plan(view).rows * 2)


class Unknown(ContinuousScheduler):
    """Runs a request that there is not."""

    says = r"plan\(\) returned a row for request 'ghost', which is unknown"

    def plan(self, view: Any) -> Any:
        return Schedule((ScheduledRow("ghost", 1),))


class TooMuch(ContinuousScheduler):
    """Gives a request a token more than it has."""

    says = r"plan\(\) gave \d+ tokens(, scheduler| to request 'warm-up-0', which has \d+ left)"

    def plan(self, view: Any) -> Any:
        return Schedule(tuple(ScheduledRow(row.request_id, row.num_tokens + 1) for row in super().plan(view).rows))


class OverBudget(ContinuousScheduler):
    """Ignores the token budget."""

    says = r"plan\(\) gave \d+ tokens, scheduler\.token_budget=64"

    def plan(self, view: Any) -> Any:
        return Schedule(tuple(ScheduledRow(r.request_id, r.remaining) for r in (*view.running, *view.waiting)))


class Fractions(ContinuousScheduler):
    """Counts tokens in floats."""

    says = r"plan\(\) gave \d+\.0 tokens"

    def plan(self, view: Any) -> Any:
        return Schedule(tuple(ScheduledRow(r.request_id, float(r.num_tokens)) for r in super().plan(view).rows))  # type: ignore[arg-type]


class Raises(ContinuousScheduler):
    """Raises at every call."""

    says = r"plan\(\) raised ZeroDivisionError: .* by zero \(schedulers\.py:\d+\)"

    def plan(self, view: Any) -> Any:
        return Schedule((ScheduledRow("x", 1 // 0),))


class RaisesLater(ContinuousScheduler):
    """Raises at its twentieth call."""

    says = r"plan\(\) raised RuntimeError: enough \(schedulers\.py:\d+\)"

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self._calls = itertools.count(1)

    def plan(self, view: Any) -> Any:
        if next(self._calls) >= 20:
            raise RuntimeError("enough")
        return super().plan(view)


class Exits(ContinuousScheduler):
    """Ends the process."""

    says = r"plan\(\) raised SystemExit: 9"

    def plan(self, view: Any) -> Any:
        raise SystemExit(9)


class Idle(ContinuousScheduler):
    """Runs nobody."""

    says = r"plan\(\) admitted none of \d+ requests, and none runs"

    def plan(self, view: Any) -> Any:
        return Schedule(())


class Starves(ContinuousScheduler):
    """Admits requests and never goes on with them."""

    says = r"plan\(\) left the only running request idle"

    def plan(self, view: Any) -> Any:
        return Schedule(tuple(ScheduledRow(r.request_id, 1) for r in view.waiting[: view.free_rows]))
