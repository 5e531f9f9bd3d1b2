"""What drafts are on a GPU, and what they cost in launches. Runs in Triton's interpreter (see
``tests/interpreted.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import EngineRequest, SamplingParams
from engine.drafting.graphs import DraftGraphs
from engine.kernels.settings import Kernels
from engine.startup.rank import drafts_of
from engine_plugins.attention_kernel.triton.kernel import TritonAttention

from ..early_reads import EarlyReads, watch_early_reads
from ..launches import count_launches
from ..laws.drafted import DRAFTERS, Models
from ..laws.harness import run_again
from ..step.capturing import capturing_engine

MOST = {0.0: (8, 30), 0.8: (10, 42)}
"""By temperature, of a step of a chain and of a chain of four drafts: the first token, where all steps go, their
rotations, and three steps."""


@pytest.mark.slow
@pytest.mark.parametrize("temperature", MOST)
def test_an_eagle3_chain_launches_little(tmp_path: Path, temperature: float) -> None:
    models, counts = Models(tmp_path), dict[int, int]()
    for width in (2, 4):
        # The first one also fills memory that is kept.
        *_, (launches, _) = proposed(chains(models, width, "triton"), width, temperature)
        counts[width] = len(launches.names)
        assert launches.names.count("chain_inputs") == 1
    of_a_step, of_four = MOST[temperature]
    assert counts[4] - counts[2] <= 2 * of_a_step and counts[4] <= of_four


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_an_eagle3_chain_on_triton_kernels_is_that_of_torch(tmp_path: Path, temperature: float) -> None:
    models, found = Models(tmp_path), []
    for kernels in ("torch", "triton"):
        chain = proposed(chains(models, 2, kernels), 2, temperature)
        found.append([drafts.tolist() for _, drafts in chain])
        assert all(reads.found == [] for reads, _ in chain)
    assert any("split_attention: kv_lens_ptr" in reads.read for reads, _ in chain), "lengths are read early"
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_a_captured_chain_has_the_launches_of_an_eager_one(tmp_path: Path, sampled: bool) -> None:
    engine, found = chains(Models(tmp_path), 2, "triton", captured=True), list[list[str]]()
    after = drafts_of(engine.runner)
    assert after is not None and engine.runner.graphs is not None
    drafter: Any = after.drafter
    propose = drafter.propose

    def counted(rows: DraftRows) -> DraftTokens:
        with count_launches() as launches:
            made: DraftTokens = propose(rows)
        if rows.capture is not None and rows.most_draft_tokens == 2 and rows.sampled is sampled:
            found.append(launches.names)
        return made

    drafter.propose = counted
    DraftGraphs(drafter, engine.runner.graphs, twice).capture()
    drafter.propose = propose
    *_, (eager, _) = proposed(engine, 2, 0.8 * sampled)
    assert found[-1] == eager.names


def twice(step: Callable[[], None]) -> Callable[[], None]:
    """As a capture does: the first run makes the memory that later ones keep."""
    step()
    return run_again(step)


def chains(models: Models, width: int, kernels: Kernels, captured: bool = False) -> Any:
    """An engine with chains of an EAGLE3 head. ``captured``: steps of a row are, and what follows them."""
    which = (f"model.path={models.path('Llama')}", *DRAFTERS["eagle3"](models, "Llama"))
    widths = ("drafter.adaptive=false", f"drafter.max_width={width}")
    shapes: dict[str, Any] = {"row_shapes": (1,) if captured else (), "query_shapes": (width + 1,)}
    return capturing_engine(*which, *widths, kernels=kernels, attention=attention, capture=run_again, **shapes)


def attention(context: Any) -> TritonAttention:
    return TritonAttention(SlotConfig(), context, num_sms=4)


def proposed(engine: Any, width: int, temperature: float) -> list[tuple[EarlyReads, Tensor]]:
    """What is launched for a request the first and the second time that so many drafts are wanted, and they,
    ``[1, width]``."""
    drafts, found = drafts_of(engine.runner), list[tuple[EarlyReads, Tensor]]()
    assert drafts is not None
    drafter: Any = drafts.drafter
    propose = drafter.propose

    def counted(rows: DraftRows) -> DraftTokens:
        with watch_early_reads() as launches:
            made: DraftTokens = propose(rows)
        if rows.most_draft_tokens == width:
            found.append((launches, made.tokens))
        return made

    drafter.propose = counted
    sampling = SamplingParams(max_tokens=width + 3, temperature=temperature, seed=1, ignore_eos=True)
    engine.core.submit(EngineRequest("one", (5, 6, 7), sampling))
    while len(found) < 2:
        engine.core.step()
    return found
