from __future__ import annotations

from engine.contracts.step_cost import StepCost
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance, decoding, make_view, request
from engine_plugins.scheduler.chunked_prefill import ChunkedPrefillConfig, ChunkedPrefillScheduler


def make() -> ChunkedPrefillScheduler:
    return ChunkedPrefillScheduler(ChunkedPrefillConfig(), build_context(BLOCK))


class TestChunkedPrefillScheduler(SchedulerConformance):
    def make(self) -> ChunkedPrefillScheduler:
        return make()


def rows_of(*args, **kwargs) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in make().plan(make_view(*args, **kwargs)).rows}


SLOW = StepCost(base_ms=5.0, per_token_ms=0.1, num_samples=100)


def test_a_long_prompt_runs_in_chunks_beside_the_decodes() -> None:
    assert rows_of([decoding(0)], [request(1, 1000)], token_budget=256) == {"r0": 1, "r1": 240}


def test_the_time_budget_limits_prompts_while_somebody_decodes() -> None:
    rows = rows_of([decoding(0)], [request(1, 1000)], itl_target_ms=15.0, step_cost=SLOW, token_budget=512)
    assert rows == {"r0": 1, "r1": 96}  # 100 tokens fit into 15 ms


def test_without_decodes_there_is_only_the_token_budget() -> None:
    assert rows_of([], [request(1, 1000)], itl_target_ms=15.0, step_cost=SLOW, token_budget=512) == {"r1": 512}


def test_a_target_that_cannot_be_met_still_lets_prompts_get_on() -> None:
    assert rows_of([decoding(0)], [request(1, 1000)], itl_target_ms=1.0, step_cost=SLOW)["r1"] == 64


def test_an_unmeasured_step_cost_limits_nothing() -> None:
    unknown = StepCost(0.0, 0.0, 0)
    assert rows_of([decoding(0)], [request(1, 1000)], itl_target_ms=1.0, step_cost=unknown)["r1"] == 240


def test_a_prompt_that_can_finish_runs_whole() -> None:
    assert rows_of([], [request(0, 200), request(1, 50)], token_budget=256) == {"r0": 200, "r1": 50}


def test_a_long_prompt_leaves_half_to_the_short_ones_after_it_and_takes_back_the_rest() -> None:
    waiting = [request(0, 5000), request(1, 30), request(2, 20)]
    assert rows_of([], waiting, token_budget=256) == {"r0": 192, "r1": 30, "r2": 20}


def test_several_long_prompts_share_a_step() -> None:
    rows = rows_of([], [request(0, 5000), request(1, 5000), request(2, 5000)], token_budget=256)
    assert rows == {"r0": 128, "r1": 64, "r2": 64}


def test_chunks_end_at_block_borders() -> None:
    rows = rows_of([request(0, 1000, 24, True)], [], token_budget=100)
    assert (24 + rows["r0"]) % BLOCK == 0
    assert 100 - rows["r0"] < BLOCK


def test_a_budget_smaller_than_a_block_still_gets_on() -> None:
    assert rows_of([], [request(0, 100), request(1, 100)], token_budget=8) == {"r0": 4}


def test_decodes_cannot_crowd_out_the_prompt_of_the_most_important_request() -> None:
    running = [request(0, 1000, 0, True), *(decoding(i) for i in range(1, 101))]
    rows = rows_of(running, [], token_budget=100)
    assert rows["r0"] == 48
    assert len(rows) == 51


def test_a_chunk_takes_no_more_blocks_than_there_are() -> None:
    assert rows_of([decoding(0, 40), request(1, 1000, 16, True)], [], free_blocks=3) == {"r0": 1, "r1": 48}


def test_the_most_important_prompt_asks_for_a_block_even_if_there_is_none() -> None:
    schedule = make().plan(make_view([request(0, 100, 32, True), decoding(1, 40)], [], free_blocks=0))
    assert [(row.request_id, row.num_tokens) for row in schedule.rows] == [("r0", 16), ("r1", 1)]
    assert schedule.preempt_order == ("r1",)


def test_a_more_important_newcomer_goes_before_a_started_prompt() -> None:
    rows = rows_of([request(0, 1000, 16, True)], [request(1, 230, priority=-1)], token_budget=256)
    assert rows == {"r0": 16, "r1": 230}


def test_a_newcomer_that_the_core_may_not_admit_never_leaves_the_running_without_a_row() -> None:
    for budget in (1, 2, 8, 100):
        rows = rows_of([request(5, 400, 4, True)], [request(1, 300, priority=-1)], token_budget=budget)
        assert rows["r5"] > 0
