"""Plans for pipeline stages: all that a first stage knows of tokens, it knows from plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.contracts.request import EngineRequest, SamplingParams
from engine.step.plan import RowResult, StepPlan, StepResult, StepRow
from tests.exact_model import expected_output
from tests.laws.harness import VOCAB, random_requests

from .simulated import SimulatedDevice, simulate


class Stages(SimulatedDevice):
    """Drafts and tokens go back with results, and a first stage follows the plans alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first_stage: dict[int, dict[int, int]] = {}
        """By row, the token at each position, as far as that stage has been told."""
        self.in_flight: list[StepPlan] = []
        self.most_in_flight = 0

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        for admit in plan.admits:
            self.first_stage[admit.row_id] = dict(enumerate(admit.tokens))
        for row in plan.rows:
            known = self.first_stage[row.row_id]
            known.update(enumerate(row.tokens, row.max_start))
            known.update(enumerate(row.drafts, row.max_start + row.num_tokens))
            text = self._rows.get(row.row_id)
            needed = [known[row.max_start + i] for i in range(row.num_queries)]
            if text is not None and row.row_id not in {admit.row_id for admit in plan.admits}:
                assert needed[: row.num_tokens] == text.tokens[row.max_start : row.max_start + row.num_tokens]
                assert row.max_start == text.computed, "what is not known is not planned"
        sampling = Counter(row.row_id for each in (*self.in_flight, plan) for row in each.rows if row.samples)
        assert not sampling or max(sampling.values()) == 1
        self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        wait = super().launch(plan)

        def waited() -> StepResult:
            self.in_flight.remove(plan)
            return wait()

        return waited

    def _run(self, row: StepRow) -> RowResult:
        result = super()._run(row)
        if row.wants_drafts and row.samples:
            result = RowResult(result.tokens, result.num_accepted, drafts=tuple(self._rows[row.row_id].drafts))
        return result


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overrides", [(), ("scheduler.token_budget=40",), ("kv_allocator=paged",)])
def test_a_stage_that_follows_the_plans_alone_knows_every_token(overrides: tuple[str, ...], drafts: int) -> None:
    pressed = {"kv_tokens": 400} if "kv_allocator=paged" in overrides else {}
    simulation = simulate(*overrides, in_flight=3, drafts=drafts, kind=Stages, micro_batches=3, **pressed)
    requests = random_requests(5, 24)
    outputs = simulation.serve(*requests)
    for request in requests:
        assert outputs[request.request_id] == expected_output(request.prompt, request.sampling.max_tokens, VOCAB)
    assert simulation.device.most_in_flight == 3


def test_rows_that_decode_are_spread_over_the_steps_in_flight() -> None:
    simulation = simulate(in_flight=3, kind=Stages, micro_batches=3)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    simulation.serve(*(EngineRequest(f"r{i}", (i + 1, i + 2), params) for i in range(9)))
    sizes = [len(plan.rows) for plan in simulation.device.plans if not plan.admits]
    steady = sizes[10:-10]
    assert steady and set(steady) == {3}, sizes
