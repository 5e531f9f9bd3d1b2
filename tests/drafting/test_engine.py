"""What drafts are on a GPU, and what they cost in launches. Runs in Triton's interpreter (see
``tests/interpreted.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kernels.settings import Kernels
from engine.startup.rank import drafts_of
from engine_plugins.attention_kernel.triton.kernel import TritonAttention

from ..launches import Launches, count_launches
from ..laws.drafted import DRAFTERS, Models, answers
from ..step.capturing import capturing_engine

MOST = {0.0: 8, 0.8: 12}
"""Of a step of a chain, by temperature."""


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_step_of_an_eagle3_chain_launches_little(tmp_path: Path, temperature: float) -> None:
    models = Models(tmp_path)
    counts = []
    for width in (2, 3):
        # The first one also fills memory that is kept.
        *_, (launches, _) = proposed(chains(models, width, "triton"), width, temperature)
        counts.append(len(launches.names))
    assert counts[1] - counts[0] <= MOST[temperature]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_an_eagle3_chain_on_triton_kernels_is_that_of_torch(tmp_path: Path, temperature: float) -> None:
    models, found = Models(tmp_path), []
    for kernels in ("torch", "triton"):
        found.append([drafts.tolist() for _, drafts in proposed(chains(models, 3, kernels), 3, temperature)])
    assert found[0] == found[1] and len(found[0]) >= 2


def chains(models: Models, width: int, kernels: Kernels) -> Any:
    """An engine with chains of an EAGLE3 head that are not captured."""
    which = (f"model.path={models.path('Llama')}", *DRAFTERS["eagle3"](models, "Llama"))
    widths = ("drafter.adaptive=false", f"drafter.max_width={width}")
    return capturing_engine(*which, *widths, kernels=kernels, attention=attention, row_shapes=())


def attention(context: Any) -> TritonAttention:
    return TritonAttention(SlotConfig(), context, num_sms=4)


def proposed(engine: Any, width: int, temperature: float) -> list[tuple[Launches, Tensor]]:
    """What is launched for a request each time that so many drafts are wanted, and they, ``[1, width]``."""
    drafts, found = drafts_of(engine.runner), list[tuple[Launches, Tensor]]()
    assert drafts is not None
    drafter: Any = drafts.drafter
    propose = drafter.propose

    def counted(rows: DraftRows) -> DraftTokens:
        with count_launches() as launches:
            made: DraftTokens = propose(rows)
        if rows.most_draft_tokens == width:
            found.append((launches, made.tokens))
        return made

    drafter.propose = counted
    sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    answers(engine.core, [EngineRequest("one", (5, 6, 7), sampling)], 1)
    return found
