"""Drafting that was switched off is tried again: in the engine, drafts of a probe must come to be judged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.drafter import Draft, DraftRow, DraftRows, DraftTokens, TargetStep
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.scheduler import StepCost
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.loop.draft_cost import DraftCost, KeepingUp
from engine.loop.step_cost import StepCostModel
from engine.loop.width import WidthController
from engine_plugins.drafter.draft_model import DraftModelDrafter
from engine_plugins.drafter.ngram import NgramDrafter

from ..execution import tiny

PROMPTS = [(3 + i, 5, 7, 11 + i) for i in range(5)]
STEPS = SamplingParams(max_tokens=230, temperature=0.0, ignore_eos=True)
COMMON = ("device=cpu", "threads=1", "model.dtype=float32", "model.max_len=256", "exporter=[]")


class Moody:
    """Turns good drafts into ones that never stand, as long as it lies."""

    lies = True

    def says(self, token: int) -> int:
        return (token + 1) % tiny.CONFIG["vocab_size"] if self.lies else token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.write(path, tiny.weights(1))
    return path


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps and drafts cost, whatever the machine does meanwhile."""
    monkeypatch.setattr(StepCostModel, "cost", lambda self: StepCost(1.0, 0.2, 100))
    monkeypatch.setattr(WidthController, "observe_step", lambda self, batch, tokens, ms: None)
    monkeypatch.setattr(DraftCost, "ms", lambda self, width: 0.1 * width)
    keeping_up(monkeypatch, 0.0)


def keeping_up(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """What it takes of a step."""
    monkeypatch.setattr(KeepingUp, "share", share)


def on_the_host(monkeypatch: pytest.MonkeyPatch, model: Path, moody: Moody) -> list[str]:
    """A drafter that has seen every answer."""
    core = build_engine(assemble([f"model.path={model}", *COMMON, "drafter=none"])).core
    seen = {prompt: answers(core, prompt) for prompt in PROMPTS}
    core.close()

    def propose(self: NgramDrafter, rows: list[DraftRow]) -> Draft:
        found = []
        for row in rows:
            answer, at = seen.get(tuple(row.tokens[: row.prompt_len]), ()), len(row.tokens) - row.prompt_len
            found.append(tuple(moody.says(token) for token in answer[at : at + row.width]))
        return Draft(tuple(found))

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    return ["drafter=ngram"]


def answers(core: EngineCore, prompt: tuple[int, ...]) -> tuple[int, ...]:
    core.submit(EngineRequest("plain", prompt, STEPS))
    found: tuple[int, ...] = ()
    while core.has_work:
        found += tuple(token for out in core.step().outputs for token in out.tokens)
    return found


def on_the_device(monkeypatch: pytest.MonkeyPatch, model: Path, moody: Moody) -> list[str]:
    """A drafter that is the target itself."""
    propose = DraftModelDrafter.propose

    def proposing(self: DraftModelDrafter, rows: DraftRows) -> DraftTokens:
        return DraftTokens(propose(self, rows).tokens.clone().apply_(moody.says))

    monkeypatch.setattr(DraftModelDrafter, "propose", proposing)
    return ["drafter=draft_model", f"drafter.path={model}"]


def widths(core: EngineCore, batch: int, stopped: int = 0) -> list[int]:
    """Of every step while so many answers are given at once; so many more are stopped by their first tokens."""
    for prompt in PROMPTS[:batch]:
        core.submit(EngineRequest(str(prompt), prompt, STEPS))
    for i in range(stopped):
        any_token = tuple(range(tiny.CONFIG["vocab_size"]))
        core.submit(EngineRequest(f"stopped {i}", PROMPTS[i], SamplingParams(stop_token_ids=any_token)))
    found = []
    while core.has_work:
        found += [event.draft_width for event in core.step().events if isinstance(event, StepEvent)]
    return found


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
@pytest.mark.parametrize("drafter", [on_the_host, on_the_device])
def test_useless_drafts_end_and_good_ones_come_back(
    drafter: Callable[[pytest.MonkeyPatch, Path, Moody], list[str]],
    overlap: str,
    batch: int,
    model: Path,
    costs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moody = Moody()
    which = drafter(monkeypatch, model, moody)
    core = build_engine(assemble([f"model.path={model}", *COMMON, *which, "drafter.max_width=4", overlap])).core
    useless = [width for _ in range(3) for width in widths(core, batch)][50:]
    moody.lies = False
    good = [width for _ in range(3) for width in widths(core, batch)]
    core.close()
    assert set(useless) == {0, 1} and sum(useless) < len(useless) / 16
    assert sum(width == 4 for width in good) > len(good) / 4


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
def test_drafting_at_rest_asks_nothing_of_the_drafter_and_comes_back_with_new_requests(
    overlap: str, batch: int, model: Path, costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody, told = Moody(), Counter[bool]()
    which = on_the_device(monkeypatch, model, moody)
    extend = DraftModelDrafter.extend

    def extending(self: DraftModelDrafter, step: TargetStep) -> None:
        told[0 in step.positions.tolist()] += step.positions.shape[0]
        extend(self, step)

    monkeypatch.setattr(DraftModelDrafter, "extend", extending)
    keeping_up(monkeypatch, 0.1)
    core = build_engine(assemble([f"model.path={model}", *COMMON, *which, "drafter.max_width=4", overlap])).core
    for _ in range(2):
        widths(core, batch)
    told.clear()
    resting = [width for _ in range(4) for width in widths(core, batch)]
    of_prompts, of_answers = told[True], told[False]
    moody.lies = False
    good = [width for _ in range(8) for width in widths(core, batch)]
    core.close()
    assert set(resting) == {0, 1} and sum(resting) < len(resting) / 16
    assert of_prompts >= 4 * batch * len(PROMPTS[0]), "new requests are told of"
    assert of_answers < 0.1 * 4 * batch * STEPS.max_tokens
    assert sum(width == 4 for width in good) > len(good) / 4


def test_prompts_that_end_together_are_drafted_for_as_the_batch_they_become(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a batch of one each: what pays for one request may not for five, whose drafts nobody would verify."""
    asked: list[int] = []
    propose = DraftModelDrafter.propose

    def proposing(self: DraftModelDrafter, rows: DraftRows) -> DraftTokens:
        asked.append(len(rows.index))
        return propose(self, rows)

    monkeypatch.setattr(WidthController, "width", lambda self, batch_size, cost: 4 if batch_size == 1 else 0)
    which = ["drafter=draft_model", f"drafter.path={model}"]
    core = build_engine(assemble([f"model.path={model}", *COMMON, *which])).core
    monkeypatch.setattr(DraftModelDrafter, "propose", proposing)
    widths(core, 5)
    assert not any(asked)
    assert 4 in widths(core, 1) and set(asked) == {0, 1}
    core.close()


@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
def test_waves_of_which_some_are_stopped_at_once_are_not_drafted_for_in_vain_and_drafting_comes_back(
    overlap: str, model: Path, costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a wave comes it is another batch than a step later."""
    asked: list[int] = []
    moody = Moody()
    which = on_the_device(monkeypatch, model, moody)
    propose = DraftModelDrafter.propose

    def proposing(self: DraftModelDrafter, rows: DraftRows) -> DraftTokens:
        asked.append(len(rows.index))
        return propose(self, rows)

    monkeypatch.setattr(DraftModelDrafter, "propose", proposing)
    keeping_up(monkeypatch, 0.1)
    core = build_engine(assemble([f"model.path={model}", *COMMON, *which, "drafter.max_width=4", overlap])).core
    for _ in range(3):
        widths(core, 3, stopped=5)
    asked.clear()
    resting = [width for _ in range(20) for width in widths(core, 3, stopped=5)]
    of_waves = sum(rows == 8 for rows in asked)
    moody.lies = False
    good = [width for _ in range(10) for width in widths(core, 3, stopped=5)]
    core.close()
    assert of_waves <= 3 and set(resting) == {0, 1} and sum(resting) < len(resting) / 64
    assert sum(width == 4 for width in good) > len(good) / 4


def served(core: EngineCore, steps: int, rng: random.Random) -> int:
    """Drafts verified while four clients ask for answers of all lengths, each as soon as it has the last one."""
    open_ids: set[str] = set()
    verified = 0
    for _ in range(steps):
        for client in range(4 - len(open_ids)):
            request_id = f"{rng.random()}"
            length = SamplingParams(max_tokens=rng.randint(20, 40), temperature=0.0, ignore_eos=True)
            core.submit(EngineRequest(request_id, PROMPTS[client], length, cache_salt=request_id))
            open_ids.add(request_id)
        out = core.step()
        open_ids -= {output.request_id for output in out.outputs if output.finish_reason is not None}
        verified += sum(event.drafted for event in out.events if isinstance(event, StepEvent))
    return verified


@pytest.mark.parametrize("overlap", ["overlap=true", "overlap=false"])
def test_requests_that_come_and_go_are_probed_with_seldom_and_drafting_comes_back(
    overlap: str, model: Path, costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are often verified by another number of requests than had asked for them."""
    moody, rng = Moody(), random.Random(1)
    which = on_the_device(monkeypatch, model, moody)
    core = build_engine(assemble([f"model.path={model}", *COMMON, *which, "drafter.max_width=4", overlap])).core
    served(core, 100, rng)
    useless = served(core, 700, rng)
    moody.lies = False
    good = served(core, 800, rng)
    core.close()
    assert 0 < useless < 25
    assert good > 1000
