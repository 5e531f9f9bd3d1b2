"""Recorded drafting: the drafts are those of drafting op by op, and no token changes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.assembly.errors import AssemblyError
from engine.contracts.drafter import DraftRows, DraftTokens, may_be_recorded
from engine.contracts.request import EngineRequest, SamplingParams
from engine.execution import graphs
from engine.execution.draft_graphs import DraftBucket, DraftGraphs, draft_buckets, draft_widths
from engine.execution.graphs import Bucket
from engine.execution.runner import NO_HISTORY, ModelRunner
from engine.execution.running import RunningStep
from engine.execution.step import StepPlan, StepResult
from engine.execution.transfer import Arriving, refill
from engine.execution.verify import Choice, VerifyRow, judge, standing_drafts
from engine.loop.build import capture_graphs, describe_drafting
from engine.loop.memory.budget import DoesNotFit
from engine.loop.messages import Progress
from engine.loop.width import WidthController
from engine.serving.tokenizer import Tokenizer
from engine.testing.no_sync import NoSync

from ..laws.drafted import DRAFTERS, Models, answers, prompts, requests_for
from . import recording
from .recording import Recording, recording_engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Behind every replayed drafting the same is done op by op and compared; how often, by rows and drafts wanted."""
    counts: Counter[str] = Counter()
    launch = ModelRunner.launch

    def launching(self: ModelRunner, plan: StepPlan) -> RunningStep:
        step = launch(self, plan)
        if step._recorded_drafts is None:
            counts["op by op"] += 1
            return step
        assert self.graphs is not None and self.drafter is not None
        bucket = self.graphs.find(plan.rows)
        assert bucket is not None
        recorded = self.graphs.recorded(bucket)
        width = step._recorded_drafts.tokens.shape[1]  # a block is filled according to its size
        rows = tuple(replace(row, wants_drafts=width if row.wants_drafts else 0) for row in plan.rows)
        with torch.inference_mode():
            wide = replace(plan, rows=rows)
            self._draft(self.drafter, wide, recorded.batch, recorded.staged, recorded.taps, step)
        expected = {i: drafts[: plan.rows[i].wants_drafts] for i, (drafts, _) in step._drafts.items()}
        step._drafts = {}
        result: StepResult = step.result()
        assert {i: row.drafts for i, row in enumerate(result.rows) if row.drafts} == expected
        counts[f"{len(plan.rows)} x {max(row.wants_drafts for row in plan.rows)}"] += 1
        return step

    monkeypatch.setattr(ModelRunner, "launch", launching)
    return counts


GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
MIXED = (
    GREEDY,
    SamplingParams(max_tokens=23, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.8, top_p=0.9, top_k=30, ignore_eos=True),
    SamplingParams(max_tokens=26, temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, ignore_eos=True),
)
"""What a row may want; of different lengths, so that batches shrink and widths differ at the end."""
DEVICE_DRAFTERS = ("eagle3", "early_exit", "target", "parallel_block")


def outputs(engine: Recording, wanted: Sequence[EngineRequest], batch: int) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers(engine.core, wanted, batch)]


@pytest.mark.parametrize("drafter", DEVICE_DRAFTERS)
def test_tokens_are_those_without_drafts_and_drafts_those_made_op_by_op(
    models: Models, drafter: str, compared: Counter[str]
) -> None:
    """Requests of every kind in batches that do not fill the recorded shapes."""
    model = f"model.path={models.path('Llama')}"
    options = (*DRAFTERS[drafter](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=3", "seed=3")
    engine, plain = recording_engine(model, *options), recording_engine(model, "drafter=none", "seed=3")
    wanted = requests_for(prompts(models, "Llama", 5), MIXED)
    assert outputs(engine, wanted, 3) == outputs(plain, wanted, 3)
    assert {"3 x 3", "2 x 3", "1 x 0"} < compared.keys() - {"op by op"}, "and narrower ones at the end"


@pytest.mark.parametrize(("drafter", "overlap"), [("eagle3", "true"), ("target", "false")])
def test_preempted_requests_and_growing_tables_change_nothing(
    models: Models, drafter: str, overlap: str, compared: Counter[str]
) -> None:
    """Too few blocks for all, prompts in chunks, prefixes shared; each request needs several blocks for its output."""
    model = f"model.path={models.path('Llama')}"
    tight = ("scheduler=chunked_prefill", "scheduler.token_budget=24", "kv_allocator=prefix_cache")
    options = (*DRAFTERS[drafter](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=4", *tight)
    engine = recording_engine(model, *options, f"overlap={overlap}", blocks=18)
    plain = recording_engine(model, "drafter=none", *tight)
    wanted = requests_for(prompts(models, "Llama", 6, seed=2), [GREEDY], max_tokens=40)
    found = answers(engine.core, wanted, 4)
    assert [answer.tokens for answer in found] == outputs(plain, wanted, 4)
    assert sum(answer.timings.preemptions for answer in found if answer.timings) > 0
    assert compared["1 x 4"] + compared["2 x 4"] > 3


def test_a_stop_inside_a_draft_ends_the_request_and_nobody_else(models: Models, compared: Counter[str]) -> None:
    model = f"model.path={models.path('Llama')}"
    engine = recording_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false")
    texts = prompts(models, "Llama", 3, seed=3)
    full = outputs(engine, requests_for(texts, [GREEDY]), 3)
    for place in (2, 3, 4):
        stops = [tokens[place] for tokens in full]
        params = [SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)) for stop in stops]
        wanted = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(full, stops, strict=True)]
        assert outputs(engine, requests_for(texts, params), 3) == wanted
    assert compared["3 x 6"] > 0


def test_a_tiny_context_is_filled_to_its_last_token(models: Models, compared: Counter[str]) -> None:
    """Recorded drafts reach further than a request may, and than its blocks do."""
    context = (f"model.path={models.path('Llama')}", "model.max_len=20")
    options = (*DRAFTERS["eagle3"](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=6")
    engine = recording_engine(*context, *options, row_shapes=(3,))
    plain = recording_engine(*context, "drafter=none", row_shapes=(3,))
    wanted = requests_for([tuple(range(n)) for n in (1, 3, 8, 12, 19)], [GREEDY])
    found = outputs(engine, wanted, 3)
    assert found == outputs(plain, wanted, 3)
    assert [len(tokens) for tokens in found] == [19, 17, 12, 8, 1]
    assert compared["3 x 6"] > 0


def test_widths_that_change_are_drafted_recorded_or_op_by_op(models: Models, compared: Counter[str]) -> None:
    """One that grows is drafted op by op once, for there is no graph for it; the tokens stay the same."""
    model = f"model.path={models.path('Llama')}"
    engine = recording_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false", row_shapes=(2,))
    full = outputs(engine, requests_for(prompts(models, "Llama", 2), [GREEDY], max_tokens=60), 2)
    compared.clear()
    widths = iter(itertools.cycle((1, 1, 3, 3, 3, 2, 0, 0, 6, 5, 2, 1, 0, 4)))
    ahead = engine.core._drafting.ahead

    def changing(*arguments: Any) -> dict[Any, int]:
        return {sequence: min(next(widths), wanted) for sequence, wanted in ahead(*arguments).items()}

    engine.core._drafting.ahead = changing  # type: ignore[method-assign]
    assert outputs(engine, requests_for(prompts(models, "Llama", 2), [GREEDY], max_tokens=60), 2) == full
    assert {"2 x 0", "2 x 1", "2 x 3", "2 x 6", "op by op"} <= compared.keys()


def test_requests_that_are_given_up_between_recorded_steps_leave_others_with_all_their_keys(
    models: Models, compared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that is the target stays right, and nothing is replayed for steps that it is not told of."""
    model = f"model.path={models.path('Llama')}"
    engine = recording_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false", row_shapes=(2,))
    wanted = requests_for(prompts(models, "Llama", 8), [GREEDY], max_tokens=40)
    full = outputs(engine, wanted, 2)
    compared.clear()
    drafting, planned, untold = engine.core._drafting, itertools.count(), 0
    launch, prepare, ahead = engine.core._device.launch, drafting.prepare, drafting.ahead
    rests = False

    def preparing(*arguments: Any) -> dict[Any, int]:
        nonlocal rests
        rests = next(planned) % 30 > 22
        return dict.fromkeys(prepare(*arguments), 0) if rests else prepare(*arguments)

    def launching(plan: StepPlan) -> Any:
        nonlocal untold
        untold += not plan.drafter_follows
        return launch(plan)

    drafting.prepare = preparing  # type: ignore[method-assign]
    drafting.ahead = lambda *arguments: {} if rests else ahead(*arguments)  # type: ignore[method-assign]
    monkeypatch.setattr(WidthController, "rests", lambda self, batch: rests)
    monkeypatch.setattr("engine.loop.drafting.WORTH_KEEPING_UP", 10**9)
    engine.core._device.launch = launching  # type: ignore[method-assign]
    found = answers(engine.core, wanted, 2)
    assert [answer.tokens for answer in found] == full
    counts = [(a.timings.drafted_tokens, a.timings.accepted_tokens) for a in found if a.timings]
    # The last token of a request may stop a chain that was right.
    assert all(accepted >= drafted - 6 for drafted, accepted in counts)
    assert untold > 20 and compared["2 x 6"] > 3 and compared["op by op"] >= untold


def test_launching_a_recorded_step_waits_for_nothing(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the host knows, only the integers of each row go to the device, through pinned memory."""
    model = f"model.path={models.path('Llama')}"
    engine = recording_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false", row_shapes=(1,))
    waits: list[bool] = []
    wait, launch, launching = Arriving.wait, ModelRunner.launch, [False]

    def noted(self: Arriving) -> tuple[Tensor, ...]:
        waits[-1] |= launching[0]
        return wait(self)

    def watched(self: ModelRunner, plan: StepPlan) -> RunningStep:
        waits.append(False)
        launching[0] = True
        with NoSync() if len(waits) > 1 else nullcontext():  # the prompt comes first
            step = launch(self, plan)
        launching[0] = False
        return step

    def filled(target: Tensor, values: Sequence[int]) -> None:
        with _disable_current_modes():
            refill(target, values)

    monkeypatch.setattr(graphs, "refill", filled)
    monkeypatch.setattr(Arriving, "wait", noted)
    monkeypatch.setattr(ModelRunner, "launch", watched)
    outputs(engine, [EngineRequest("r", tuple(range(20)), GREEDY)], 1)
    assert waits[0] and len(waits) > 4 and not any(waits[1:]), "only behind the prompt"


@pytest.mark.parametrize("drafter", ["eagle3", "parallel_block", "target"])
def test_keys_of_recorded_drafting_are_as_good_as_those_made_op_by_op(models: Models, drafter: str) -> None:
    """Drafts stand as often, made from keys that were recorded only: the shipped heads know what the bundled model will
    say, and a draft model that is the target is never wrong."""
    tokenizer = Tokenizer.from_directory(str(models.path("bundled")))
    asked = [f"What does {name} do?" for name in ("json.dumps", "os.listdir", "time.sleep")]
    texts = [tuple(tokenizer.encode_chat_now([{"role": "user", "content": text}])) for text in asked]
    which: tuple[str, ...] = (f"drafter={drafter}",)
    if drafter == "target":
        which, texts = (f"model.path={models.path('Llama')}", *DRAFTERS["target"](models, "Llama")), [(5, 6, 7), (8, 9)]
    found = []
    for recorded in (True, False):
        engine = recording_engine(*which, "drafter.adaptive=false", "drafter.max_width=3", row_shapes=(3,))
        assert engine.runner.draft_graphs is not None
        if not recorded:
            engine.runner.draft_graphs = None
        done = answers(engine.core, requests_for(texts, [GREEDY], max_tokens=16), 3)
        timings = [answer.timings for answer in done if answer.timings]
        found.append([(a.tokens, t.drafted_tokens, t.accepted_tokens) for a, t in zip(done, timings, strict=True)])
    assert found[0] == found[1]
    assert sum(accepted for _, _, accepted in found[0]) > 15


# Parts --------------------------------------------------------------------------------------------------------------


def test_drafts_that_stand_are_those_that_the_host_judges() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(200):
        inputs, tokens = torch.randint(0, 3, (2, 5, 4), generator=generator)
        num_drafts = torch.randint(0, 4, (5,), generator=generator)
        rows = [
            VerifyRow(GREEDY, 0, 0, 1, NO_HISTORY, (), tuple(row[1 : 1 + n].tolist()))
            for row, n in zip(inputs, num_drafts.tolist(), strict=True)
        ]
        real = torch.cat([row[: n + 1] for row, n in zip(tokens, num_drafts.tolist(), strict=True)])
        wanted = [verdict.num_accepted for verdict in judge(Choice(tuple(rows), real, (), {}))]
        assert standing_drafts(inputs, tokens, num_drafts).tolist() == wanted
    assert standing_drafts(inputs[:, :1], tokens[:, :1], torch.zeros(5)).tolist() == [0] * 5


def test_graphs_follow_the_widths_that_a_step_leads_to() -> None:
    assert draft_widths(1, 6) == (0, 1, 3, 6)
    assert draft_widths(4, 6) == (0, 3)
    assert draft_widths(7, 6) == (0, 6)
    assert draft_widths(1, 1) == (0, 1)
    assert draft_buckets(None, [Bucket(1, 1)]) == []
    drafter = Toy()
    assert draft_buckets(drafter, [Bucket(2, 3)]) == [DraftBucket(Bucket(2, 3), 0), DraftBucket(Bucket(2, 3), 2)]
    drafter.recordable = False
    assert draft_buckets(drafter, [Bucket(2, 3)]) == [] and not may_be_recorded(drafter)
    drafter.recordable, drafter.returns_probs = True, True
    assert not may_be_recorded(drafter), "the host must choose"
    assert not may_be_recorded(Old()), "a drafter that says nothing of recordings"


class Old:
    """Proposes the newest token again and again."""

    placement, returns_probs, max_width = "device", False, 2
    taps, kv, kv_lookahead, weights_bytes = (), None, 0, 0

    def start(self, engine: Any) -> None: ...

    def extend(self, step: Any) -> None: ...

    def propose(self, rows: DraftRows) -> DraftTokens:
        return DraftTokens(rows.tokens[:, None].expand(-1, max(rows.width, 1)))

    def release(self, slot: int) -> None: ...


class Toy(Old):
    recordable = True


class Reading(Toy):
    def propose(self, rows: DraftRows) -> DraftTokens:
        assert rows.tokens.max().item() >= 0
        return super().propose(rows)


class Listing(Toy):
    def propose(self, rows: DraftRows) -> DraftTokens:
        assert min(rows.positions.tolist(), default=0) >= 0
        return super().propose(rows)


class Uploading(Toy):
    def extend(self, step: Any) -> None:
        torch.tensor(step.q_lens)


class Few(Toy):
    def propose(self, rows: DraftRows) -> DraftTokens:
        return DraftTokens(super().propose(rows).tokens[:, :1])


def toy_engine(drafter: Any) -> Recording:
    """The tiny model with a drafter of this file."""
    return recording_engine("drafter=early_exit", "drafter.adaptive=false", row_shapes=(1, 2), drafter=drafter)


@pytest.mark.parametrize(
    ("drafter", "what"), [(Reading, "_local_scalar_dense|item"), (Listing, "tolist"), (Uploading, "lift_fresh")]
)
def test_a_drafter_that_asks_the_host_is_refused_with_what_it_does(drafter: type[Toy], what: str) -> None:
    says = f"drafter=early_exit says recordable, .*({what}).* execution=compile"
    with pytest.raises(AssemblyError, match=says) as refusal:
        toy_engine(drafter())
    assert not isinstance(refusal.value, DoesNotFit), "no memory, whatever is freed, would help"


def test_a_recorded_drafter_must_draft_as_many_as_are_wanted() -> None:
    with pytest.raises(AssemblyError, match=r"proposed tokens \[2, 1\]: expected 2 rows of at least 2 and no prob"):
        toy_engine(Few())


def test_a_drafter_that_cannot_be_recorded_drafts_op_by_op_and_the_plan_says_so(compared: Counter[str]) -> None:
    tokens = []
    for drafter in (Old(), Toy()):
        engine = toy_engine(drafter)
        compared.clear()
        tokens.append(outputs(engine, [EngineRequest("r", (5, 9, 5, 9), GREEDY)], 1))
        recorded = isinstance(drafter, Toy)
        assert (engine.runner.draft_graphs is not None) is recorded
        (line,) = describe_drafting(engine.runner)
        assert line.startswith("Drafts: recorded, 14 graphs" if recorded else "Drafts: op by op behind every step")
        assert (compared["1 x 2"] > 5) is recorded
    assert tokens[0] == tokens[1]


def test_graphs_are_captured_largest_first_and_once() -> None:
    engine, order = toy_engine(Toy()), []
    assert engine.runner.graphs is not None and engine.runner.draft_graphs is not None
    drafts = DraftGraphs(Toy(), engine.runner.graphs, engine.capture)
    drafts.capture(lambda fraction, what: order.append(what))
    assert order == [
        "2 x 3, 2 drafts", "2 x 3, 0 drafts", "2 x 1, 2 drafts", "2 x 2, 1 drafts", "2 x 2, 0 drafts",
        "2 x 1, 1 drafts", "1 x 3, 2 drafts", "1 x 3, 0 drafts", "1 x 1, 2 drafts", "1 x 2, 1 drafts",
        "1 x 2, 0 drafts", "2 x 1, 0 drafts", "1 x 1, 1 drafts", "1 x 1, 0 drafts",
    ]  # fmt: skip
    assert drafts.buckets == engine.runner.draft_graphs.buckets
    with pytest.raises(AssertionError, match="once, before the engine is ready"):
        drafts.capture()


def test_captures_of_steps_and_drafts_are_one_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    monkeypatch.setattr(recording, "capture_graphs", lambda *arguments: capture_graphs(*arguments, seen.append))
    engine = toy_engine(Toy())
    assert engine.runner.graphs is not None and engine.runner.draft_graphs is not None
    count = len(engine.runner.graphs.buckets) + len(engine.runner.draft_graphs.buckets)
    assert {one.phase for one in seen} == {"capture graphs"}
    assert [one.fraction for one in seen] == pytest.approx([i / count for i in range(count)])
