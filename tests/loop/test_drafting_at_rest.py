"""Requests that a drafter on the device does not keep up with: nothing is drafted from keys that are missing."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.scheduler import StepCost
from engine.execution.runner import ModelRunner
from engine.execution.running import RunningStep
from engine.execution.step import StepPlan
from engine.loop import drafting
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.loop.draft_cost import KeepingUp
from engine.loop.planning import Planner
from engine.loop.pool import Pool
from engine.loop.sequence import Sequence
from engine.loop.width import WidthController

from ..laws.drafted import DRAFTERS, NONE, Models, answers, engine, prompts, replace_params, requests_for

GREEDY = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
SMALL = "memory.kv_tokens=256"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Naps:
    """Drafts, then none, then a short rest, over and over, but never in time with the requests. Counts steps a drafter
    was told of, or not, and requests that a prefix hit left without drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = random.Random(0)
        lengths = itertools.cycle((("drafts", 10, 40), ("none", 1, 8), ("rest", 1, 6)))
        phase = itertools.chain.from_iterable([now] * rng.randint(low, high) for now, low, high in lengths)
        self.now = next(phase)
        self.steps = Counter[bool]()
        self.behind_gaps: list[Sequence] = []
        finish, admit = Planner._finish, Pool.admit

        def width(controller: WidthController, batch_size: int, cost: StepCost) -> int:
            self.now = next(phase)
            return 3 if self.now == "drafts" else 0

        def rests(controller: WidthController, batch_size: int) -> bool:
            return self.now == "rest"

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
        monkeypatch.setattr(drafting, "WORTH_KEEPING_UP", 10**9)
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

    naps = Naps(monkeypatch)
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
    """Prompts are always told, in chunks of one token as well, and so are steps with drafts."""
    Naps(monkeypatch)
    untold: list[StepPlan] = []
    finish = Planner._finish

    def finishing(planner: Planner, *arguments: object) -> object:
        planned = finish(planner, *arguments)  # type: ignore[arg-type]
        untold.extend([] if planned.plan.drafter_follows else [planned.plan])
        return planned

    monkeypatch.setattr(Planner, "_finish", finishing)
    chunks = ("scheduler=chunked_prefill", "scheduler.token_budget=5")
    core = engine(models, "Llama", *DRAFTERS["target"](models, "Llama"), "drafter.max_width=3", *chunks)
    texts = [*prompts(models, "Llama", 12, seed=6), *((i,) for i in range(12))]
    answers(core, requests_for(texts, [GREEDY]), 4)
    core.close()
    rows = [row for plan in untold for row in plan.rows]
    assert len(rows) > 50 and not any(plan.admits for plan in untold)
    assert all(row.samples and row.num_queries == 1 and row.wants_drafts == 0 for row in rows)
    assert all(row.output_index > 0 for row in rows)


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


# Requests side by side ----------------------------------------------------------------------------------------------


class Load:
    """Drafting that rests while ``rests`` says so, and else drafts 3 for everybody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rests = True
        monkeypatch.setattr(WidthController, "width", lambda controller, batch, cost: 0 if self.rests else 3)
        monkeypatch.setattr(WidthController, "rests", lambda controller, batch: self.rests)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    return Load(monkeypatch)


def submit(core: EngineCore, name: str, length: int) -> None:
    text = tuple((7 * i + sum(map(ord, name))) % 60 for i in range(9))
    core.submit(EngineRequest(name, text, replace_params(GREEDY, max_tokens=length)))


def target(models: Models, *overrides: str) -> EngineCore:
    return engine(models, "Llama", *DRAFTERS["target"](models, "Llama"), "drafter.max_width=3", *overrides)


@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
def test_a_request_that_was_given_up_does_not_slow_those_that_are_drafted_for(
    models: Models, overlap: str, load: Load
) -> None:
    core = target(models, overlap)
    submit(core, "given up", 230)
    for _ in range(8):
        core.step()
    load.rests = False
    submit(core, "new", 61)
    steps, reasons = 0, dict[str, str | None]()
    while "new" not in reasons:
        reasons |= {out.request_id: out.finish_reason for out in core.step().outputs if out.finish_reason}
        steps += 1
    core.close()
    assert steps < 61 / 4 + 5, "4 tokens a step, but for the first and the last"


def test_a_request_that_drafts_have_brought_much_is_kept_through_a_burst(models: Models, load: Load) -> None:
    core, load.rests = target(models), False
    submit(core, "long", 150)
    while core._queues.by_id["long"].num_accepted < drafting.WORTH_KEEPING_UP:
        core.step()
    load.rests = True
    for i in range(3):
        submit(core, f"short {i}", 20)
    for _ in range(12):
        core.step()
    assert all(sequence.drafter_follows for sequence in core._queues.running)
    load.rests = False
    timings = []
    while core.has_work:
        timings += [out.timings for out in core.step().outputs if out.request_id == "long" and out.timings]
    core.close()
    assert timings[-1].accepted_tokens > 90


@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
def test_a_step_that_fails_leaves_no_gap_unnoticed(
    models: Models, overlap: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step that is not told is planned on top of one that is told and fails. What failed is run again."""
    launch, failed = ModelRunner.launch, list[int]()

    def launching(self: ModelRunner, plan: StepPlan) -> RunningStep:
        if not failed and any(row.start == 15 and row.num_tokens == 1 for row in plan.rows):
            failed.append(plan.plan_id)
            raise RuntimeError("once")
        return launch(self, plan)

    finish = Planner._finish

    def finishing(planner: Planner, *arguments: object, **others: object) -> object:
        # Rest begins behind the end of a block.
        load.rests |= any(s.scheduled >= 15 and s.request_id == "first" for s in planner._queues.running)
        return finish(planner, *arguments, **others)  # type: ignore[arg-type]

    load.rests = False
    monkeypatch.setattr(WidthController, "width", lambda controller, batch, cost: 0)
    monkeypatch.setattr(ModelRunner, "launch", launching)
    monkeypatch.setattr(Planner, "_finish", finishing)
    core = target(models, overlap, "kv_allocator=prefix_cache", "kv_allocator.block_size=16")
    submit(core, "first", 40), submit(core, "second", 40)
    tokens: tuple[int, ...] = ()
    while core.has_work:
        for out in core.step().outputs:
            tokens += out.tokens if out.request_id == "first" else ()
    assert failed and len(tokens) == 40
    load.rests = False
    monkeypatch.setattr(WidthController, "width", lambda controller, batch, cost: 3)
    text = (*(((7 * i + sum(map(ord, "first"))) % 60) for i in range(9)), *tokens)
    found = answers(core, [EngineRequest("again", text[:24], GREEDY)], 1)[0].timings
    core.close()
    assert found is not None and found.cached_tokens == 16
    assert found.accepted_tokens >= found.drafted_tokens - 3


def test_a_drafter_without_keys_of_its_own_is_never_at_rest(models: Models, load: Load) -> None:
    core = engine(models, "Llama", *DRAFTERS["early_exit"](models, "Llama"), "drafter.max_width=3")
    submit(core, "r", 60)
    for _ in range(20):
        core.step()
    assert core._queues.running and all(sequence.drafter_follows for sequence in core._queues.running)
    core.close()


def test_what_keeping_up_takes_is_measured_when_told_at_once_and_when_told_late(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    observe = KeepingUp.observe

    def observing(self: KeepingUp, step_ms: float, ms: float, late_ms: float, late_steps: int) -> None:
        seen.append((step_ms, ms, late_ms, late_steps))
        observe(self, step_ms, ms, late_ms, late_steps)

    monkeypatch.setattr(KeepingUp, "observe", observing)
    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    core = build_engine(assemble(["drafter=eagle3", "device=cpu", "threads=1", "exporter=[]"])).core
    answers(core, requests_for([tuple(range(5, 20))] * 4, [GREEDY]), 4)
    core.close()
    late = [(ms, steps) for _, _, ms, steps in seen if steps]
    assert len(seen) > 30 and all(step_ms > 0.0 and ms > 0.0 for step_ms, ms, _, _ in seen)
    assert late and all(ms > 0.0 for ms, _ in late) and sum(steps for _, steps in late) > len(seen) // 2
