"""Schedulers with a bug each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contracts.config import SchedulerConfig
from engine.contracts.scheduler import RequestView, Schedule, ScheduledRow, SchedulerView
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance
from engine_plugins.scheduler.continuous import ContinuousScheduler
from tests.testing.mutants.mutant import OnPlugin, mutant


class Suite(OnPlugin, SchedulerConformance):
    def make(self) -> Any:
        return self.plugin(SchedulerConfig(), build_context(BLOCK))


class Counting(ContinuousScheduler):
    """Counts its plans."""

    calls = 0

    def plan(self, view: SchedulerView) -> Schedule:
        self.calls += 1
        return super().plan(view)


@mutant(Suite, "test_planning_is_pure")
class PeriodOfTwo(Counting):
    """Every second plan has its rows the other way round."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        return replace(schedule, rows=schedule.rows[::-1]) if self.calls % 2 == 0 else schedule


@mutant(Suite, "test_planning_is_pure")
class PeriodOfFive(Counting):
    """Every fifth plan leaves out the last row."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        return replace(schedule, rows=schedule.rows[:1]) if self.calls % 5 == 0 else schedule


@mutant(Suite, "test_schedules_keep_the_rules")
class ForgetsDrafts(ContinuousScheduler):
    """Takes no tokens off the budget for drafts."""

    def plan(self, view: SchedulerView) -> Schedule:
        running = tuple(replace(request, num_draft_tokens=0) for request in view.running)
        return super().plan(replace(view, running=running))


@mutant(Suite, "test_no_more_requests_start_than_there_are_rows")
class OneRowTooMany(ContinuousScheduler):
    """Admits one request more than there are free rows."""

    def plan(self, view: SchedulerView) -> Schedule:
        return super().plan(replace(view, free_rows=view.free_rows + 1))


@mutant(Suite, "test_schedules_keep_the_rules")
class BeyondTheKnown(ContinuousScheduler):
    """Schedules the token that a decode has yet to sample as well."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        return replace(schedule, rows=tuple(replace(row, num_tokens=row.num_tokens + 1) for row in schedule.rows))


def further(schedule: Schedule, *rows: ScheduledRow) -> Schedule:
    return replace(schedule, rows=(*schedule.rows, *rows))


@mutant(Suite, "test_schedules_keep_the_rules")
class SameRequestTwice(ContinuousScheduler):
    """Gives what is left of the budget to a request that has a row already."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        left = view.token_budget - sum(row.num_tokens for row in schedule.rows)
        return further(schedule, ScheduledRow(schedule.rows[0].request_id, 1)) if schedule.rows and left else schedule


@mutant(Suite, "test_schedules_keep_the_rules")
class RowsOfNoTokens(ContinuousScheduler):
    """Keeps a row of no tokens for whoever did not fit."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        placed = {row.request_id for row in schedule.rows}
        rest = [request for request in view.running if request.request_id not in placed]
        return further(schedule, *(ScheduledRow(request.request_id, 0) for request in rest))


@mutant(Suite, "test_schedules_keep_the_rules")
class PreemptsEverybody(ContinuousScheduler):
    """Offers every running request for preemption, the most important one included."""

    def plan(self, view: SchedulerView) -> Schedule:
        victims = tuple(request.request_id for request in reversed(view.running))
        return replace(super().plan(view), preempt_order=victims)


@mutant(Suite, "test_schedules_keep_the_rules")
class PreemptsTheWaiting(ContinuousScheduler):
    """Offers requests for preemption that do not run."""

    def plan(self, view: SchedulerView) -> Schedule:
        return replace(super().plan(view), preempt_order=tuple(request.request_id for request in view.waiting))


@mutant(Suite, "test_schedules_keep_the_rules")
class ForgetsBlocks(ContinuousScheduler):
    """Admits newcomers whether or not the free blocks hold them as well."""

    def plan(self, view: SchedulerView) -> Schedule:
        return super().plan(replace(view, free_blocks=(1 << 30,) * len(view.free_blocks)))


@mutant(Suite, "test_every_request_ends_and_every_block_comes_back")
class WaitsForTheWholePrompt(ContinuousScheduler):
    """Never starts a prompt that is longer than the token budget."""

    def plan(self, view: SchedulerView) -> Schedule:
        short = tuple(request for request in view.waiting if request.remaining <= view.token_budget)
        return super().plan(replace(view, waiting=short))


@mutant(Suite, "test_something_runs_whenever_something_can", "test_every_request_ends_and_every_block_comes_back")
class DecodesOnly(ContinuousScheduler):
    """Forgets prompts that were cut: a running request that prefills is never scheduled again."""

    def plan(self, view: SchedulerView) -> Schedule:
        decoding = tuple(request for request in view.running if request.remaining == 1)
        return super().plan(replace(view, running=decoding))


@mutant(Suite, "test_the_running_get_a_row_whoever_else_waits")
class NewcomersFirst(ContinuousScheduler):
    """Fills the budget with waiting prompts first; who runs gets what is left."""

    def plan(self, view: SchedulerView) -> Schedule:
        newest = super().plan(replace(view, running=(), num_running=0))
        return newest if newest.rows else super().plan(view)


@mutant(Suite, "test_planning_is_pure")
class NeverAgain(ContinuousScheduler):
    """Does not admit a request a second time: one that was preempted starves."""

    def __init__(self, config: SchedulerConfig, context: Any) -> None:
        super().__init__(config, context)
        self._ran: set[str] = set()

    def plan(self, view: SchedulerView) -> Schedule:
        fresh = tuple(request for request in view.waiting if request.request_id not in self._ran)
        schedule = super().plan(replace(view, waiting=fresh))
        self._ran.update(request.request_id for request in view.running)
        return schedule


@mutant(Suite, "test_schedules_keep_the_rules")
class ListOfRows(ContinuousScheduler):
    """Returns its rows as a list, which the core could change."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        return replace(schedule, rows=list(schedule.rows))  # type: ignore[arg-type]


@mutant(Suite, "test_schedules_keep_the_rules")
class OneVictimAsText(ContinuousScheduler):
    """Names its only victim as a string, which is read letter by letter."""

    def plan(self, view: SchedulerView) -> Schedule:
        schedule = super().plan(view)
        return replace(schedule, preempt_order=schedule.preempt_order[0] if schedule.preempt_order else ())


@mutant(Suite, "test_planning_is_pure")
class RemembersSizes(ContinuousScheduler):
    """Lets the longest prompt it has ever seen decide how much of a prompt it computes."""

    _longest = 0

    def plan(self, view: SchedulerView) -> Schedule:
        self._longest = max([self._longest, *(request.remaining for request in view.waiting)])
        limit = max(8, min(view.token_budget, self._longest))
        return super().plan(replace(view, token_budget=limit))


@mutant(Suite, "test_schedules_keep_the_rules")
class IgnoresCachedPrefixes(ContinuousScheduler):
    """Computes a waiting request from its first token, whatever the prefix cache holds of it."""

    def plan(self, view: SchedulerView) -> Schedule:
        def whole(request: RequestView) -> RequestView:
            return replace(request, computed=0)

        return super().plan(replace(view, waiting=tuple(map(whole, view.waiting))))
