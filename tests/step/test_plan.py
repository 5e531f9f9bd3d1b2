"""Plans and results travel between processes: plain data."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from msgspec.inspect import CustomType, Type, multi_type_info

from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.step.plan import Admit, NewBlocks, RowResult, StepPlan, StepResult, StepRow

PLAN = StepPlan(
    7,
    (
        Admit(
            2, (5, 6), 1, 2, SamplingParams(seed=-(2**63), logit_bias={3: -1.5}, stop_token_ids=(9,)), 2**64 - 1, (1,)
        ),
    ),
    (StepRow(2, 1, 1, new_blocks=(NewBlocks(0, 1, (4, 8)),)), StepRow(0, 9, 1, True, 2, (3, 4), wants_drafts=3)),
    syncs_drafter=False,
)
RESULT = StepResult(
    7,
    (RowResult((5, 6), 1, (TokenLogprobs(5, -0.5, ((5, -0.5),)),), (TokenLogprobs(1, -2.0),)), RowResult(error="NaN")),
    device_ms=1.5,
    draft_ms=0.25,
)


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
def test_nothing_is_lost_on_the_way(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_plans_and_results_hold_no_tensors() -> None:
    seen: list[Type] = []

    def visit(node: object) -> None:
        if isinstance(node, Type) and node not in seen:
            seen.append(node)
        for child in node if isinstance(node, tuple) else (node,):
            for name in getattr(child, "__struct_fields__", ()):
                visit(getattr(child, name))

    visit(multi_type_info((StepPlan, StepResult)))
    assert len(seen) > 8 and not [node for node in seen if isinstance(node, CustomType)]


def test_whoever_plans_needs_no_torch() -> None:
    code = "import sys, engine.step.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
