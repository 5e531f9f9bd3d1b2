"""What drafts cost on a GPU, in launches. Runs in Triton's interpreter (see ``tests/interpreted.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.contracts.config import SlotConfig
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import EngineRequest, SamplingParams
from engine.startup.rank import drafts_of
from engine_plugins.attention_kernel.triton.kernel import TritonAttention

from ..launches import count_launches
from ..laws.drafted import DRAFTERS, Models, answers
from ..step.capturing import capturing_engine

MOST = {0.0: 8, 0.8: 12}
"""Of a step of a chain, by temperature."""


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_step_of_an_eagle3_chain_launches_little(tmp_path: Path, temperature: float) -> None:
    models = Models(tmp_path)
    counts = []
    for width in (2, 3):
        which = (f"model.path={models.path('Llama')}", *DRAFTERS["eagle3"](models, "Llama"))
        widths = ("drafter.adaptive=false", f"drafter.max_width={width}")
        engine = capturing_engine(*which, *widths, kernels="triton", attention=attention, row_shapes=())
        counts.append(launches_of_chains(engine, width, temperature))
    assert counts[1] - counts[0] <= MOST[temperature]


def attention(context: Any) -> TritonAttention:
    return TritonAttention(SlotConfig(), context, num_sms=4)


def launches_of_chains(engine: Any, width: int, temperature: float) -> int:
    """Of proposing so many drafts to one request."""
    drafts, found = drafts_of(engine.runner), list[int]()
    assert drafts is not None
    drafter: Any = drafts.drafter
    propose = drafter.propose

    def counted(rows: DraftRows) -> DraftTokens:
        with count_launches() as launches:
            proposed: DraftTokens = propose(rows)
        if rows.most_draft_tokens == width:
            found.append(len(launches.names))
        return proposed

    drafter.propose = counted
    sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    answers(engine.core, [EngineRequest("one", (5, 6, 7), sampling)], 1)
    return found[-1]  # the first one also fills memory that is kept
