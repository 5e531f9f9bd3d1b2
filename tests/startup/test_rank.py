"""Which steps of an engine are captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.assembly.bind import bind
from engine.startup.rank import graph_buckets
from tests.kernels import tiny

from .test_memory import plan_of


@pytest.mark.parametrize(
    ("overrides", "max_len", "longest"),
    [
        (("scheduler.token_budget=2048",), 200, 128),
        (("scheduler.token_budget=100",), 200, 64),
        (("scheduler.token_budget=2048",), 40, 32),
        (("parallelism=threads", "communicator=simulated", "parallelism.pcp=2"), 200, 0),
    ],
)
def test_prompts_are_captured_as_far_as_steps_reach_unless_ranks_share_out_their_tokens(
    tmp_path: Path, overrides: tuple[str, ...], max_len: int, longest: int
) -> None:
    plan = plan_of(tiny.write(tmp_path), "model.max_len=200", "scheduler.max_requests=2", *overrides)
    plan = replace(plan, device=replace(plan.device, capability=(9, 0)))
    found = graph_buckets(plan, bind(plan), max_len)
    prompts = [(bucket.rows, bucket.queries) for bucket in found if bucket.prompt]
    assert prompts == [(1, n) for n in (16, 32, 64, 128, 256, 512) if n <= longest]
    assert [(bucket.rows, bucket.queries) for bucket in found if not bucket.prompt] == [(1, 1), (2, 1)]
