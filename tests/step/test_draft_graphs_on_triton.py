"""CapturedStep drafting on the Triton kernels, in Triton's interpreter: the tokens and drafts of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.contracts.config import SlotConfig
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kernels.triton.device import runs_triton
from engine.startup.rank import drafts_of
from tests.interpreted import run_interpreted, starts_interpreter

from ..laws.drafted import DRAFTERS, Answer, Models, answers
from ..laws.harness import run_again
from .capturing import capturing_engine

QUESTION = EngineRequest("short", (5, 6), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
SHAPES: dict[str, Any] = {"row_shapes": (2,), "query_shapes": (1, 3), "capture": run_again}


@pytest.mark.slow
@starts_interpreter
def test_captured_drafts_on_the_triton_kernels_under_the_interpreter() -> None:
    assert run_interpreted(Path(__file__), select="are_those_of_plain") >= 1


@pytest.mark.skipif(not runs_triton("cpu"), reason="runs in a process of its own, with TRITON_INTERPRET=1")
@pytest.mark.parametrize("drafter", ["eagle3", pytest.param("parallel_block", marks=pytest.mark.slow)])
def test_tokens_and_drafts_are_those_of_plain_torch(tmp_path: Path, drafter: str) -> None:
    models = Models(tmp_path)
    drafts = ("drafter.adaptive=false", "drafter.max_width=2")
    which = (f"model.path={models.path('Llama')}", *DRAFTERS[drafter](models, "Llama"), *drafts)

    def attention(context: Any) -> Any:
        from engine_plugins.attention_kernel.triton.kernel import TritonAttention

        return TritonAttention(SlotConfig(), context, num_sms=4)

    triton = capturing_engine(*which, kernels="triton", attention=attention, **SHAPES)
    found, expected = (answers(e.core, [QUESTION], 1)[0] for e in (triton, capturing_engine(*which, **SHAPES)))
    after = drafts_of(triton.runner)
    assert after is not None and after.graphs is not None and len(after.graphs.buckets) == 8
    assert outcome(found) == outcome(expected)


def outcome(answer: Answer) -> tuple[tuple[int, ...], int, int]:
    assert answer.timings is not None and answer.timings.drafted_tokens > 0
    return answer.tokens, answer.timings.drafted_tokens, answer.timings.accepted_tokens
