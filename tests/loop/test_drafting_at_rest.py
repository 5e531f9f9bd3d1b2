"""Requests that a drafter on the device does not keep up with: nothing is drafted from keys that are missing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.scheduler import StepCost
from engine.execution.step import StepPlan
from engine.loop.planning import Planner
from engine.loop.pool import Pool
from engine.loop.sequence import Sequence
from engine.loop.width import WidthController

from ..laws.drafted import DRAFTERS, NONE, Models, answers, engine, prompts, requests_for

GREEDY = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
SMALL = "memory.kv_tokens=256"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Naps:
    """Drafts, then none, then rest, over and over. Counts steps a drafter was told of, or not, and requests that a
    prefix hit left without drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.asked = 0
        self.steps = Counter[bool]()
        self.behind_gaps: list[Sequence] = []
        finish, admit = Planner._finish, Pool.admit

        def width(controller: WidthController, batch_size: int, cost: StepCost) -> int:
            self.asked += 1
            return 3 if self.asked % every < every // 2 else 0

        def rests(controller: WidthController, batch_size: int) -> bool:
            return self.asked % every > every * 4 // 5

        def finishing(planner: Planner, *arguments: object) -> object:
            planned = finish(planner, *arguments)  # type: ignore[arg-type]
            self.steps[planned.plan.drafter_follows] += 1
            return planned

        def admitting(pool: Pool, sequence: Sequence) -> bool:
            admitted = admit(pool, sequence)
            self.behind_gaps += [] if sequence.drafter_follows else [sequence]
            return admitted

        monkeypatch.setattr(WidthController, "width", width)
        monkeypatch.setattr(WidthController, "rests", rests)
        monkeypatch.setattr(Planner, "_finish", finishing)
        monkeypatch.setattr(Pool, "admit", admitting)


@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "cache",
    [
        ("kv_allocator=prefix_cache",),
        ("kv_allocator=prefix_cache", SMALL),
        ("kv_allocator=paged", SMALL, "scheduler=continuous"),
        ("kv_allocator=contiguous",),
    ],
)
def test_a_draft_model_that_never_errs_never_errs_whomever_it_gave_up(
    models: Models, cache: tuple[str, ...], batch: int, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two turns of conversations: the second one's prompt is the first and its answer, whose keys may be missing.
    Blocks change hands, and requests are preempted, where there are few."""
    core = engine(models, "Llama", *NONE)
    first = prompts(models, "Llama", 12, seed=4)
    said = [answer.tokens for answer in answers(core, requests_for(first, [GREEDY]), 1)]
    second = [(*prompt, *tokens, 7, 8) for prompt, tokens in zip(first, said, strict=True)]
    wanted = said + [answer.tokens for answer in answers(core, requests_for(second, [GREEDY]), 1)]
    core.close()

    naps = Naps(monkeypatch, 45)
    core = engine(models, "Llama", *DRAFTERS["target"](models, "Llama"), "drafter.max_width=3", overlap, *cache)
    found = [a for texts in (first, second) for a in answers(core, requests_for(texts, [GREEDY]), batch)]
    core.close()
    assert [answer.tokens for answer in found] == wanted
    counts = [(a.timings.drafted_tokens, a.timings.accepted_tokens) for a in found if a.timings]
    # The last token of a request may stop a chain that was right.
    assert all(accepted >= drafted - 3 for drafted, accepted in counts)
    assert sum(drafted for drafted, _ in counts) > 60 and min(naps.steps[True], naps.steps[False]) > 20
    if cache == ("kv_allocator=prefix_cache",):
        assert naps.behind_gaps and all(sequence.num_drafted == 0 for sequence in naps.behind_gaps)


def test_blocks_with_missing_keys_are_good_again_for_whoever_writes_them_anew(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a small pool is given up once; then requests that share nothing with those before are drafted for."""
    core = engine(models, "Llama", *DRAFTERS["target"](models, "Llama"), "drafter.max_width=3", SMALL)
    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    monkeypatch.setattr(WidthController, "rests", lambda self, batch: True)
    texts = prompts(models, "Llama", 12, seed=5)
    answers(core, requests_for(texts[:6], [GREEDY]), 2)
    assert len(core._pool._gaps) > core.stats().blocks_total // 2
    monkeypatch.undo()
    core.reset_prefix_cache()
    found = answers(core, requests_for(texts[6:], [GREEDY]), 2)
    core.close()
    assert all(answer.timings and answer.timings.accepted_tokens > 25 for answer in found)


def test_what_a_drafter_is_not_told_of_is_plain_decoding_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks of them and steps with drafts are always told, also beside requests that were given up."""
    Naps(monkeypatch, 45)
    untold: list[StepPlan] = []
    finish = Planner._finish

    def finishing(planner: Planner, *arguments: object) -> object:
        planned = finish(planner, *arguments)  # type: ignore[arg-type]
        untold.extend([] if planned.plan.drafter_follows else [planned.plan])
        return planned

    monkeypatch.setattr(Planner, "_finish", finishing)
    chunks = ("scheduler=chunked_prefill", "scheduler.token_budget=16")
    core = engine(models, "Llama", *DRAFTERS["target"](models, "Llama"), "drafter.max_width=3", *chunks)
    texts = [*prompts(models, "Llama", 12, seed=6), *((i,) for i in range(12))]
    answers(core, requests_for(texts, [GREEDY]), 4)
    core.close()
    rows = [row for plan in untold for row in plan.rows]
    assert len(rows) > 50 and not any(plan.admits for plan in untold)
    assert all(row.samples and row.num_queries == 1 and row.wants_drafts == 0 for row in rows)


def test_a_drafter_on_the_host_is_never_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of nothing, so there is nothing to save."""
    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    monkeypatch.setattr(WidthController, "rests", lambda self, batch: True)
    core = engine(Models(tmp_path), "Llama", "drafter=ngram")
    core.submit(EngineRequest("r", (1, 2, 3, 1, 2, 3, 1, 2), GREEDY))
    for _ in range(10):
        core.step()
    assert all(sequence.drafter_follows for sequence in core._queues.running)
    monkeypatch.undo()
    while core.has_work:
        outputs = core.step().outputs
    core.close()
    timings = outputs[-1].timings
    assert timings is not None and timings.drafted_tokens > 0
