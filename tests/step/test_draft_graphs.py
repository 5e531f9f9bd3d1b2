"""Captured drafting: the drafts are those of drafting op by op, and no token changes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.assembly.errors import AssemblyError
from engine.contracts.drafter import DraftRows, DraftTokens, may_be_captured
from engine.contracts.request import EngineRequest, SamplingParams
from engine.drafting.graphs import DraftBucket, DraftGraphs, draft_buckets, draft_counts
from engine.drafting.runner import Drafts
from engine.kernels.transfer import Arriving, refill
from engine.loop.messages import Progress
from engine.service.parsing import parse_messages
from engine.service.tokenizer import Tokenizer
from engine.startup.memory.budget import DoesNotFit
from engine.startup.rank import capture_graphs, describe_drafting, drafts_of
from engine.step import graphs
from engine.step.graphs import Bucket
from engine.step.plan import StepPlan
from engine.step.runner import ModelRunner
from engine.step.running import RunningStep
from engine.testing.no_sync import NoSync
from tests.selection import few

from ..laws.drafted import DRAFTERS, Models, answers, prompts, requests_for
from . import capturing
from .capturing import Capturing, capturing_engine
from .frozen import FrozenGraphs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """After every replayed drafting the same is done op by op and compared; how often, by rows and drafts wanted."""
    counts: Counter[str] = Counter()
    launch = ModelRunner.launch

    def launching(self: ModelRunner, plan: StepPlan) -> RunningStep:
        step = launch(self, plan)
        after = drafts_of(self)
        if after is None:
            return step
        bucket = None if self.graphs is None else self.graphs.find(plan.rows)
        found = None if bucket is None or after.graphs is None else after.graphs.find(bucket, plan.rows)
        if not plan.syncs_drafter or found is None:
            counts["op by op" if plan.syncs_drafter else "not at all"] += 1
            return step
        drafts = drafted(self, plan)
        redraft(self, plan, found)
        assert drafted(self, plan) == drafts
        counts[f"{len(plan.rows)} x {max(row.wants_drafts for row in plan.rows)}"] += 1
        return step

    monkeypatch.setattr(ModelRunner, "launch", launching)
    return counts


def drafted(runner: ModelRunner, plan: StepPlan) -> list[list[int]]:
    """What the tables hold after the newest token of each row, as far as the row wants drafts."""
    tables, found = runner.tables, []
    for row in plan.rows:
        first = int(tables.computed[row.row_id]) + 1
        found.append(tables.tokens[row.row_id, first : first + row.wants_drafts].tolist())
        assert all(0 <= token < tables.vocab_size for token in found[-1])
    return found


@torch.inference_mode()
def redraft(runner: ModelRunner, plan: StepPlan, found: DraftBucket) -> None:
    """Draft op by op after a replayed step, which was drafted after already; as many drafts as then, for a block is
    filled according to its size."""
    after = drafts_of(runner)
    assert runner.graphs is not None and after is not None
    wanted = ((row, found.num_draft_tokens if row.wants_drafts else 0) for row in plan.rows)
    rows = tuple(msgspec.structs.replace(row, wants_drafts=drafts) for row, drafts in wanted)
    for row in rows:
        first = int(runner.tables.computed[row.row_id]) + 1
        runner.tables.tokens[row.row_id, first : first + row.wants_drafts] = -1
    captured = runner.graphs.captured(found.step)
    op_by_op = Drafts(after.drafter, runner.tables)
    again = msgspec.structs.replace(plan, rows=rows)
    op_by_op.after(again, captured.step_inputs, captured.aux_hidden_states, captured)


GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
MIXED = (
    GREEDY,
    SamplingParams(max_tokens=23, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.8, top_p=0.9, top_k=30, ignore_eos=True),
    SamplingParams(max_tokens=26, temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, ignore_eos=True),
)
"""What a row may want; of different lengths, so that batches shrink and numbers of drafts differ at the end."""
DEVICE_DRAFTERS = ("eagle3", "early_exit", "target", "parallel_block")


def outputs(engine: Capturing, wanted: Sequence[EngineRequest], batch: int) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers(engine.core, wanted, batch)]


@few(1)
@pytest.mark.parametrize(
    "drafter",
    [
        each if each in ("eagle3", "parallel_block") else pytest.param(each, marks=pytest.mark.slow)
        for each in DEVICE_DRAFTERS
    ],
)
def test_tokens_are_those_without_drafts_and_drafts_those_made_op_by_op(
    models: Models, drafter: str, compared: Counter[str]
) -> None:
    """Requests of every kind in batches that do not fill the captured shapes."""
    model = f"model.path={models.path('Llama')}"
    options = (*DRAFTERS[drafter](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=3", "seed=3")
    engine = capturing_engine(model, *options, row_shapes=(2, 4))
    plain = capturing_engine(model, "drafter=none", "seed=3", row_shapes=())
    wanted = requests_for(prompts(models, "Llama", 5), MIXED)
    assert outputs(engine, wanted, 3) == outputs(plain, wanted, 3)
    assert {"3 x 3", "2 x 3"} < compared.keys() - {"op by op", "not at all"}, "and fewer at the end"


@pytest.mark.slow
def test_preempted_requests_and_growing_tables_change_nothing(models: Models, compared: Counter[str]) -> None:
    """Too few blocks for all, prompts in chunks, prefixes shared; each request needs several blocks for its output."""
    model = f"model.path={models.path('Llama')}"
    tight = ("scheduler=chunked_prefill", "scheduler.token_budget=24", "kv_allocator=prefix_cache")
    options = (*DRAFTERS["eagle3"](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=4", *tight)
    engine = capturing_engine(model, *options, blocks=18)
    plain = capturing_engine(model, "drafter=none", *tight)
    wanted = requests_for(prompts(models, "Llama", 6, seed=2), [GREEDY], max_tokens=40)
    found = answers(engine.core, wanted, 4)
    assert [answer.tokens for answer in found] == outputs(plain, wanted, 4)
    assert sum(answer.timings.preemptions for answer in found if answer.timings) > 0
    assert compared["1 x 4"] + compared["2 x 4"] > 3


@pytest.mark.slow
def test_a_stop_inside_a_draft_ends_the_request_and_nobody_else(models: Models, compared: Counter[str]) -> None:
    model = f"model.path={models.path('Llama')}"
    engine = capturing_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false")
    texts = prompts(models, "Llama", 3, seed=3)
    full = outputs(engine, requests_for(texts, [GREEDY]), 3)
    for place in (2, 3, 4):
        stops = [tokens[place] for tokens in full]
        params = [SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)) for stop in stops]
        wanted = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(full, stops, strict=True)]
        assert outputs(engine, requests_for(texts, params), 3) == wanted
    assert compared["3 x 6"] > 0


@pytest.mark.slow
def test_a_tiny_context_is_filled_to_its_last_token(models: Models, compared: Counter[str]) -> None:
    """CapturedStep drafts reach further than a request may, and than its blocks do."""
    context = (f"model.path={models.path('Llama')}", "model.max_len=20")
    options = (*DRAFTERS["eagle3"](models, "Llama"), "drafter.adaptive=false", "drafter.max_width=6")
    engine = capturing_engine(*context, *options, row_shapes=(3,))
    plain = capturing_engine(*context, "drafter=none", row_shapes=(3,))
    wanted = requests_for([tuple(range(n)) for n in (1, 3, 8, 12, 19)], [GREEDY])
    found = outputs(engine, wanted, 3)
    assert found == outputs(plain, wanted, 3)
    assert [len(tokens) for tokens in found] == [19, 17, 12, 8, 1]
    assert compared["3 x 6"] > 0


def test_numbers_of_drafts_that_change_are_drafted_captured_or_op_by_op_or_not_at_all(
    models: Models, compared: Counter[str]
) -> None:
    """One that grows is drafted op by op once, for there is no graph for it. While none are wanted the drafter is not
    told of the steps: its keys have gaps afterwards, and the tokens stay the same."""
    model = f"model.path={models.path('Llama')}"
    engine = capturing_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.adaptive=false", row_shapes=(2,))
    full = outputs(engine, requests_for(prompts(models, "Llama", 2), [GREEDY], max_tokens=40), 2)
    compared.clear()
    wanted = itertools.cycle((1, 1, 3, 3, 3, 2, 0, 0, 6, 5, 2, 1, 0, 4))
    engine.core._drafting.wants_after = lambda rows: dict.fromkeys(rows, next(wanted))  # type: ignore[method-assign]
    assert outputs(engine, requests_for(prompts(models, "Llama", 2), [GREEDY], max_tokens=40), 2) == full
    assert {"2 x 1", "2 x 3", "2 x 6", "op by op"} <= compared.keys()


def test_no_drafter_runs_after_a_step_that_does_not_sync_it(models: Models) -> None:
    model = f"model.path={models.path('Llama')}"
    engine = capturing_engine(model, *DRAFTERS["target"](models, "Llama"), "drafter.max_width=2", row_shapes=(1,))
    capture, replayed, launch = engine.capture, [], engine.runner.launch
    assert isinstance(capture, FrozenGraphs)

    def counting(plan: StepPlan) -> RunningStep:
        before = capture.replayed
        step = launch(plan)
        replayed.append((plan.syncs_drafter, capture.replayed - before))
        return step

    engine.runner.launch = counting  # type: ignore[method-assign]
    with engine.core.drafting(0):
        outputs(engine, [EngineRequest("r", (1, 2, 3), GREEDY)], 1)
    assert replayed[0] == (True, 1), "the prompt, after which the drafter ran op by op"
    assert set(replayed[1:]) == {(False, 1)} and len(replayed) > 20


@few(1)
@pytest.mark.parametrize("captured", [True, False], ids=["captured drafts", "op by op"])
def test_launching_waits_for_nothing(models: Models, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the host knows, only the integers of each row go to the device after the prompt, and nothing comes back
    before the result is asked for."""
    model = f"model.path={models.path('Llama')}"
    few_drafts = ("drafter.adaptive=false", "drafter.max_width=2")
    engine = capturing_engine(model, *DRAFTERS["target"](models, "Llama"), *few_drafts, row_shapes=(1,))
    if not captured:
        drafts_of(engine.runner).graphs = None
    launches, launching = [0], [False]
    wait, launch = Arriving.wait, ModelRunner.launch

    def noted(self: Arriving) -> tuple[Tensor, ...]:
        assert not launching[0]
        return wait(self)

    def watched(self: ModelRunner, plan: StepPlan) -> RunningStep:
        launches[0] += 1
        launching[0] = True
        with NoSync() if captured and launches[0] > 1 else nullcontext():  # a prompt is uploaded
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
    assert launches[0] > 4


@pytest.mark.parametrize(
    "drafter", ["target", *(pytest.param(each, marks=pytest.mark.slow) for each in ("eagle3", "parallel_block"))]
)
def test_keys_of_captured_drafting_are_as_good_as_those_made_op_by_op(models: Models, drafter: str) -> None:
    """Drafts are accepted as often, made from keys of captured drafting alone: the shipped heads know what the bundled
    model will say, and a draft model that is the target is never wrong."""
    tokenizer = Tokenizer.from_directory(str(models.path("bundled")))
    asked = [f"What does {name} do?" for name in ("json.dumps", "os.listdir", "time.sleep")]
    texts = [tuple(tokenizer.encode_chat_now(parse_messages([{"role": "user", "content": text}]))) for text in asked]
    which: tuple[str, ...] = (f"drafter={drafter}",)
    if drafter == "target":
        which, texts = (f"model.path={models.path('Llama')}", *DRAFTERS["target"](models, "Llama")), [(5, 6, 7), (8, 9)]
    found = []
    engine = capturing_engine(*which, "drafter.adaptive=false", "drafter.max_width=3", row_shapes=(3,))
    assert drafts_of(engine.runner).graphs is not None
    for captured in (True, False):
        if not captured:
            engine.core.reset_prefix_cache()
            drafts_of(engine.runner).graphs = None
        done = answers(engine.core, requests_for(texts, [GREEDY], max_tokens=16), 3)
        timings = [answer.timings for answer in done if answer.timings]
        found.append([(a.tokens, t.drafted_tokens, t.accepted_tokens) for a, t in zip(done, timings, strict=True)])
    assert found[0] == found[1]
    assert sum(accepted for _, _, accepted in found[0]) > 15


# Parts --------------------------------------------------------------------------------------------------------------


def test_graphs_exist_for_the_numbers_of_drafts_that_a_step_leads_to() -> None:
    assert draft_counts(Bucket(2, 1), 6) == (1, 3, 6)
    assert draft_counts(Bucket(2, 4), 6) == (3,)
    assert draft_counts(Bucket(2, 7), 6) == (6,)
    assert draft_counts(Bucket(2, 1), 1) == (1,)
    assert draft_counts(Bucket(1, 16, prompt=True), 6) == (6,)
    assert draft_buckets(None, [Bucket(1, 1)]) == []
    drafter = Toy()
    greedy, sampled = DraftBucket(Bucket(2, 3), 2), DraftBucket(Bucket(2, 3), 2, sampled=True)
    assert draft_buckets(drafter, [Bucket(2, 3)]) == [greedy, sampled]
    drafter.capturable = False
    assert draft_buckets(drafter, [Bucket(2, 3)]) == [] and not may_be_captured(drafter)
    assert not may_be_captured(Old()), "a drafter that says nothing of captures"


class Old:
    """Proposes the newest token again and again."""

    placement, max_width = "device", 2
    aux_layers, kv, kv_lookahead, weights_bytes = (), None, 0, 0

    def start(self, engine: Any) -> None: ...

    def extend(self, step: Any) -> None: ...

    def propose(self, rows: DraftRows) -> DraftTokens:
        return DraftTokens(rows.tokens[:, None].expand(-1, max(rows.most_draft_tokens, 1)))

    def release(self, row_id: int) -> None: ...


class Toy(Old):
    capturable = True


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


def toy_engine(models: Models, drafter: Any) -> Capturing:
    """The tiny model with a drafter of this file."""
    which = (f"model.path={models.path('Llama')}", *DRAFTERS["early_exit"](models, "Llama"))
    return capturing_engine(*which, "drafter.adaptive=false", row_shapes=(1, 2), drafter=drafter)


@few(1)
@pytest.mark.parametrize(
    ("drafter", "what"), [(Reading, "_local_scalar_dense|item"), (Listing, "tolist"), (Uploading, "lift_fresh")]
)
def test_a_drafter_that_asks_the_host_is_refused_with_what_it_does(
    models: Models, drafter: type[Toy], what: str
) -> None:
    says = f"drafter=early_exit says capturable, .*({what}).* execution=compile"
    with pytest.raises(AssemblyError, match=says) as refusal:
        toy_engine(models, drafter())
    assert not isinstance(refusal.value, DoesNotFit), "no memory, whatever is freed, would help"


def test_a_captured_drafter_must_draft_as_many_as_are_wanted(models: Models) -> None:
    with pytest.raises(AssemblyError, match=r"proposed tokens \[1, 1\], expected 1 rows of at least 2"):
        toy_engine(models, Few())


def test_a_drafter_that_cannot_be_captured_drafts_eagerly_and_the_plan_says_so(
    models: Models, compared: Counter[str]
) -> None:
    tokens = []
    for drafter in (Old(), Toy()):
        engine = toy_engine(models, drafter)
        compared.clear()
        tokens.append(outputs(engine, [EngineRequest("r", (5, 9, 5, 9), GREEDY)], 1))
        captured = isinstance(drafter, Toy)
        assert (drafts_of(engine.runner).graphs is not None) is captured
        (line,) = describe_drafting(engine.runner)
        assert line.startswith("Drafts: captured, 20 graphs" if captured else "Drafts: eager after every step")
        assert (compared["1 x 2"] > 5) is captured
    assert tokens[0] == tokens[1]


def test_graphs_are_captured_largest_first_and_once(models: Models) -> None:
    engine, order = toy_engine(models, Toy()), []
    assert engine.runner.graphs is not None and drafts_of(engine.runner).graphs is not None
    drafts = DraftGraphs(Toy(), engine.runner.graphs, engine.capture)
    drafts.capture(lambda fraction, what: order.append(what))
    prompts = ("a prompt of 16, 2", "a prompt of 8, 2")
    decode = ("2 x 3, 2", "2 x 1, 2", "2 x 2, 1", "2 x 1, 1", "1 x 3, 2", "1 x 1, 2", "1 x 2, 1", "1 x 1, 1")
    assert order == [f"{shape} drafts" for shape in (*prompts, *decode) for _ in ("greedy", "sampled")]
    assert drafts.buckets == drafts_of(engine.runner).graphs.buckets
    with pytest.raises(AssertionError, match="once, before the engine is ready"):
        drafts.capture()


def test_captures_of_steps_and_drafts_are_one_progress(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    monkeypatch.setattr(capturing, "capture_graphs", lambda *arguments: capture_graphs(*arguments, seen.append))
    engine = toy_engine(models, Toy())
    assert engine.runner.graphs is not None and drafts_of(engine.runner).graphs is not None
    count = len(engine.runner.graphs.buckets) + len(drafts_of(engine.runner).graphs.buckets)
    assert {one.phase for one in seen} == {"capture graphs"}
    assert [one.fraction for one in seen] == pytest.approx([i / count for i in range(count)])
