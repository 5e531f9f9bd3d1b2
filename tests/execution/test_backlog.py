"""Decode steps nobody drafts behind are told to a drafter later, and nothing shows it."""

from collections import Counter

import pytest
import torch

from engine.assembly.assemble import assemble
from engine.contracts.drafter import DraftRows, DraftTokens, TargetStep
from engine.contracts.request import SamplingParams
from engine.contracts.scheduler import StepCost
from engine.execution import backlog
from engine.execution.backlog import Backlog
from engine.execution.runner import ModelRunner
from engine.loop.build import build_engine
from engine.loop.width import WidthController
from engine_plugins.drafter.eagle3.drafter import Eagle3Drafter, Eagle3Head
from engine_plugins.drafter.early_exit import EarlyExitDrafter

from ..laws.drafted import DRAFTERS, Answer, Models, answers, engine, prompts, requests_for

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
NAME = "Llama"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Bursts:
    """Drafts for half of ``every`` calls, then widths of 0 for the other half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.calls = 0

        def width(controller: WidthController, batch_size: int, cost: StepCost) -> int:
            self.calls += 1
            return 3 if self.calls % every < every // 2 else 0

        monkeypatch.setattr(WidthController, "width", width)


def run(models: Models, batch: int, *overrides: str) -> list[Answer]:
    core = engine(models, NAME, *DRAFTERS["target"](models, NAME), "drafter.max_width=3", *overrides)
    found = answers(core, requests_for(prompts(models, NAME, 6), [GREEDY]), batch)
    core.close()
    return found


def acceptance(found: list[Answer]) -> list[tuple[int, int]]:
    return [(a.timings.drafted_tokens, a.timings.accepted_tokens) for a in found if a.timings is not None]


@pytest.mark.parametrize("overrides", [(), ("kv_allocator=prefix_cache",), ("memory.kv_tokens=256", "overlap=false")])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_model_that_never_errs_never_errs_behind_steps_that_waited(
    models: Models, batch: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that change hands and prefix hits included: one key not written would show as a rejected draft."""
    Bursts(monkeypatch, 60)
    waited = Counter[str]()
    add = Backlog.add

    def counting(self: Backlog, *arguments: object) -> None:
        waited["steps"] += 1
        add(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Backlog, "add", counting)
    drafted = acceptance(run(models, batch, *overrides))
    assert waited["steps"] > 20 and sum(d for d, _ in drafted) > 50
    # The last token of a request may stop a chain that was right.
    assert all(accepted >= proposed - 3 for proposed, accepted in drafted)


def test_steps_that_waited_are_told_as_one_in_their_order(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they say what the steps would have said one by one, and never more than a few tokens wait."""
    told: list[TargetStep] = []
    extend = Eagle3Drafter.extend

    def extending(self: Eagle3Drafter, step: TargetStep) -> None:
        told.append(step)
        extend(self, step)

    def seen(waiting: bool) -> list[dict[tuple[int, int], tuple[int, int, float]]]:
        """By slot and position: token, next token and the sum of what was tapped, request by request."""
        told.clear()
        if not waiting:
            monkeypatch.setattr(Backlog, "takes", lambda self, plan: False)
        core = engine(models, NAME, *DRAFTERS["eagle3"](models, NAME), "drafter.max_width=3")
        told.clear()
        found = []
        for prompt in prompts(models, NAME, 3):
            answers(core, requests_for([prompt], [GREEDY]), 1)
            found.append({})
            # What is told before its prompt is of the request before.
            first = next(i for i, step in enumerate(told) if 0 in step.positions.tolist())
            for step in told[first:]:
                sums = sum(tap.float().sum(-1) for tap in step.taps)
                assert isinstance(sums, torch.Tensor)
                columns = (step.slots, step.positions, step.tokens, step.next_tokens, sums)
                for slot, position, token, after, total in zip(*(c.tolist() for c in columns), strict=True):
                    found[-1][slot, position] = token, after, round(total, 3)
            told.clear()
        core.close()
        return found

    monkeypatch.setattr(Eagle3Drafter, "extend", extending)
    monkeypatch.setattr(backlog, "MOST_WAITING", 16)
    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    late = seen(waiting=True)
    at_once = seen(waiting=False)
    for a, b in zip(late, at_once, strict=True):
        # Of the last few steps of a request the drafter is told when the next request comes.
        missing = b.keys() - a.keys()
        assert len(missing) <= 16 and a.keys() <= b.keys()
        assert all(a[key] == b[key] for key in a.keys() & b.keys())


def test_while_nobody_wants_drafts_nothing_is_proposed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    propose, launch = Eagle3Drafter.propose, ModelRunner.launch

    def proposing(self: Eagle3Drafter, rows: DraftRows) -> object:
        calls["proposals"] += 1
        return propose(self, rows)

    def launching(self: ModelRunner, plan: object) -> object:
        calls["steps"] += 1
        return launch(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    core = engine(models, NAME, *DRAFTERS["eagle3"](models, NAME), "kv_allocator.block_size=32")
    monkeypatch.setattr(Eagle3Drafter, "propose", proposing)
    monkeypatch.setattr(ModelRunner, "launch", launching)
    answers(core, requests_for(prompts(models, NAME, 1), [GREEDY]), 1)
    core.close()
    assert calls["steps"] > 50 and calls["proposals"] < 12


def test_a_drafter_that_fails_once_over_steps_that_waited_fails_one_request_at_most(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, failed = prompts(models, NAME, 3), Counter[str]()
    extend = Eagle3Drafter.extend

    def failing(self: Eagle3Drafter, step: TargetStep) -> None:
        if min(step.q_lens) > 1 and 0 not in step.positions.tolist() and not failed["steps"]:
            failed["steps"] += 1
            raise RuntimeError("no room")
        extend(self, step)

    monkeypatch.setattr(WidthController, "width", lambda self, batch, cost: 0)
    core = engine(models, NAME, *DRAFTERS["eagle3"](models, NAME), "drafter.max_width=3")
    wanted = [a.tokens for a in answers(core, requests_for(texts, [GREEDY]), 1)]
    monkeypatch.setattr(Eagle3Drafter, "extend", failing)
    reasons, tokens = [], []
    for request in requests_for(texts, [GREEDY]):
        core.submit(request)
        outputs = []
        while core.has_work:
            outputs += core.step().outputs
        reasons.append(outputs[-1].finish_reason)
        tokens.append(tuple(token for output in outputs for token in output.tokens))
    core.close()
    assert failed["steps"] == 1 and reasons.count("error") <= 1
    assert all(a == b for a, b, reason in zip(tokens, wanted, reasons, strict=True) if reason != "error")


def test_a_head_drafts_the_same_behind_tokens_of_which_it_only_noted_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head that comes with the bundled model, which is right often enough to show what it knows."""
    propose, noted = Eagle3Drafter.propose, Counter[str]()
    drafts: list[list[list[int]]] = []

    def proposing(self: Eagle3Drafter, rows: DraftRows) -> DraftTokens:
        found = propose(self, rows)
        drafts[-1].extend(row[:width] for row, width in zip(found.tokens.tolist(), rows.widths, strict=False))
        return found

    def noting(self: Eagle3Head, *arguments: torch.Tensor, place: object) -> None:
        noted["steps"] += 1
        note(self, *arguments, place=place)

    def in_full(self: Eagle3Head, *arguments: torch.Tensor, place: object) -> None:
        self.follow(*arguments, place=place)

    note = Eagle3Head.note
    texts = [tuple(range(5 + i, 60)) for i in range(3)]
    for way in (noting, in_full):
        drafts.append([])
        monkeypatch.setattr(Eagle3Head, "note", way)
        monkeypatch.setattr(Eagle3Drafter, "propose", proposing)
        Bursts(monkeypatch, 40)
        core = build_engine(assemble(["drafter=eagle3", "device=cpu", "threads=1", "exporter=[]"])).core
        drafts[-1].clear()
        answers(core, requests_for(texts, [GREEDY]), 3)
        core.close()
    assert noted["steps"] > 3 and len(drafts[0]) > 20
    assert drafts[0] == drafts[1]


def test_a_stateless_drafter_is_told_of_no_step_that_nobody_drafts_behind(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    Bursts(monkeypatch, 60)
    monkeypatch.setattr(EarlyExitDrafter, "extend", lambda self, step: told.append(step.drafts_follow))
    wanted = requests_for(prompts(models, NAME, 6), [GREEDY])
    plain = engine(models, NAME, "drafter=none")
    expected = [answer.tokens for answer in answers(plain, wanted, 3)]
    core = engine(models, NAME, *DRAFTERS["early_exit"](models, NAME))
    found = answers(core, wanted, 3)
    plain.close()
    core.close()
    assert [answer.tokens for answer in found] == expected
    assert told and all(told) and len(told) < core.stats().step / 2 and sum(n for n, _ in acceptance(found)) > 50
