"""How long prompts take, by what steps cost."""

from __future__ import annotations

import pytest

from engine.contracts.step_cost import StepCost, StepWork
from engine.service.prefill_time import STEP_TOKENS, prefill_s, prefill_tokens_per_s

COST = StepCost(10.0, 0.5, 64, per_row_ms=2.0, per_prefill_context_ms=0.001, gap_ms=1.0)


def test_prompts_take_as_many_steps_as_fit_into_the_budget() -> None:
    step_s, rest_s = ((COST.ms(StepWork.chunk(tokens)) + 1.0) / 1e3 for tokens in (100, 50))
    assert prefill_s(COST, 250, 100) == pytest.approx(2 * step_s + rest_s)
    assert prefill_tokens_per_s(COST, 100) == pytest.approx(100 / step_s)


def test_steps_are_not_assumed_larger_than_prompts_commonly_are() -> None:
    assert prefill_tokens_per_s(COST, 1 << 20) == prefill_tokens_per_s(COST, STEP_TOKENS)


def test_nothing_takes_no_time_and_nothing_measured_is_not_known() -> None:
    unmeasured = StepCost(0.0, 0.0, 0)
    for cost in (None, unmeasured):
        assert prefill_s(cost, 0, 100) == 0.0
        assert prefill_s(cost, 1, 100) is None and prefill_tokens_per_s(cost, 100) is None
