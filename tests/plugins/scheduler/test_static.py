from __future__ import annotations

from engine.contracts.config import SchedulerConfig
from engine.contracts.step_cost import StepCost
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance, decoding, make_view, request
from engine_plugins.scheduler.static import StaticScheduler


def make() -> StaticScheduler:
    return StaticScheduler(SchedulerConfig(), build_context(BLOCK))


class TestStaticScheduler(SchedulerConformance):
    def make(self) -> StaticScheduler:
        return make()


def rows_of(*args, **kwargs) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in make().plan(make_view(*args, **kwargs)).rows}


def test_nobody_joins_a_running_batch() -> None:
    assert rows_of([decoding(0)], [request(1, 10)]) == {"r0": 1}


def test_all_prompts_of_a_batch_run_before_anybody_decodes() -> None:
    assert rows_of([decoding(0), request(1, 100, 1, True)], []) == {"r1": 99}


def test_prompts_beyond_the_budget_join_the_batch_with_a_first_token() -> None:
    assert rows_of([], [request(0, 250), request(1, 100)], token_budget=256) == {"r0": 250, "r1": 6}
    assert rows_of([], [request(0, 900), request(1, 100)], token_budget=256) == {"r0": 255, "r1": 1}


def test_a_batch_has_blocks_for_everything_its_members_may_produce() -> None:
    long_answer = request(1, 16, max_output=64)
    assert rows_of([], [request(0, 16), long_answer], free_blocks=6) == {"r0": 16}
    assert rows_of([], [request(0, 16), long_answer], free_blocks=7) == {"r0": 16, "r1": 16}


def test_a_batch_is_no_larger_than_decodes_within_the_itl_target() -> None:
    waiting = [request(arrival, 10) for arrival in range(8)]
    cost = StepCost(8.0, 1.0, num_samples=100, per_row_ms=0.5)
    assert len(rows_of([], waiting, step_cost=cost)) == 8
    assert len(rows_of([], waiting, step_cost=cost, itl_target_ms=12.5)) == 3
    assert len(rows_of([], waiting, step_cost=cost, itl_target_ms=1.0)) == 1
