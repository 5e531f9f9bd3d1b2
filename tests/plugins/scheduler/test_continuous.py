from __future__ import annotations

from engine.contracts.config import SchedulerConfig
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance, decoding, make_view, request
from engine_plugins.scheduler.continuous import ContinuousScheduler


def make() -> ContinuousScheduler:
    return ContinuousScheduler(SchedulerConfig(), build_context(BLOCK))


class TestContinuousScheduler(SchedulerConformance):
    def make(self) -> ContinuousScheduler:
        return make()


def rows_of(*args, **kwargs) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in make().plan(make_view(*args, **kwargs)).rows}


def test_a_newcomer_joins_the_running_with_its_whole_prompt() -> None:
    assert rows_of([decoding(0)], [request(1, 100), request(2, 50)]) == {"r0": 1, "r1": 100, "r2": 50}


def test_a_prompt_that_does_not_fit_waits_and_holds_up_those_after_it() -> None:
    assert rows_of([], [request(0, 200), request(1, 100), request(2, 10)], token_budget=256) == {"r0": 200}


def test_a_prompt_longer_than_the_budget_runs_alone_in_pieces() -> None:
    assert rows_of([], [request(0, 600), request(1, 10)], token_budget=256) == {"r0": 256}
    assert rows_of([request(0, 600, 256, True)], [request(1, 10)], token_budget=256) == {"r0": 256}
    assert rows_of([request(0, 600, 512, True)], [request(1, 10)], token_budget=256) == {"r0": 88, "r1": 10}


def test_drafts_count_against_the_budget() -> None:
    running = [decoding(i, num_draft_tokens=3) for i in range(3)]
    assert rows_of(running, [], token_budget=9) == {"r0": 1, "r1": 1}


def test_a_decode_short_of_a_block_takes_it_from_the_newest() -> None:
    at_border = [decoding(i, known=33) for i in range(3)]
    schedule = make().plan(make_view(at_border, [request(3, 5)], free_blocks=0))
    assert [row.request_id for row in schedule.rows] == ["r0", "r1"]
    assert schedule.preempt_order == ("r2", "r1")


def test_the_least_important_is_preempted_first_and_the_most_important_never() -> None:
    running = [decoding(0, priority=5), decoding(1), decoding(2), decoding(3, priority=5)]
    assert make().plan(make_view(running, [])).preempt_order == ("r3", "r0", "r2")


def test_a_newcomer_leaves_the_blocks_that_the_running_will_need() -> None:
    running = [decoding(0, known=40), request(1, 200, 100, True)]
    needed = 13 - 7 + 2  # the running prompt's rest, and one block for each running request
    newcomer = request(2, 16)
    assert "r2" not in rows_of(running, [newcomer], free_blocks=needed)
    assert "r2" in rows_of(running, [newcomer], free_blocks=needed + 1)


def test_requests_run_in_order_of_priority_then_arrival() -> None:
    waiting = [request(0, 100), request(1, 100, priority=-1), request(2, 100)]
    assert list(rows_of([], waiting, free_rows=2)) == ["r1", "r0"]
