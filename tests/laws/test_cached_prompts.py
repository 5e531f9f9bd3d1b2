"""A hit of the prefix cache may end at any token: what is computed after it is what a run without cache computes, and
no more is computed than must be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams, Timings
from engine.loop.core import EngineCore
from tests.selection import few

from .drafted import DRAFTERS, NONE, Models, answers, engine, pairwise, requests_for
from .harness import BLOCK, VOCAB, Exact, assert_nothing_held, exact_engine, expected, run

CACHE = ("kv_allocator=prefix_cache", "drafter=none")
OVERLAP = ("overlap=true", "overlap=false")


def ask(exact: Exact, prompt: Sequence[int], max_tokens: int = 5, name: str = "r") -> tuple[list[int], Timings, int]:
    """Tokens and timings of one request, and how many tokens of its prompt were computed."""
    exact.core.submit(request := greedy(name, prompt, max_tokens))
    tokens: list[int] = []
    timings, computed = None, 0
    while exact.core.has_work:
        step = exact.core.step()
        computed += sum(event.num_prefill_tokens for event in step.events if isinstance(event, StepEvent))
        for out in step.outputs:
            tokens += out.tokens
            timings = out.timings or timings
    assert tokens == expected(request) and timings is not None
    return tokens, timings, computed


def greedy(name: str, prompt: Sequence[int], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0))


# How much is computed -----------------------------------------------------------------------------------------------


@few(10)
@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("steps", ["eager", "captured"])
@pytest.mark.parametrize("length", [2, BLOCK, 4 * BLOCK, 4 * BLOCK + 5])
@pytest.mark.parametrize("max_tokens", [1, 2 * BLOCK])
def test_a_prompt_that_was_seen_before_computes_one_token(
    overlap: str, steps: str, length: int, max_tokens: int
) -> None:
    exact, prompt = exact_engine(*CACHE, overlap, graphs=steps == "captured"), range(length)
    assert ask(exact, prompt, max_tokens)[1].cached_tokens == 0
    for _ in range(2):
        _, timings, computed = ask(exact, prompt, max_tokens)
        assert (timings.cached_tokens, computed) == (length - 1, 1)
    assert_nothing_held(exact)
    exact.core.close()


@pytest.mark.parametrize("overlap", OVERLAP)
def test_each_turn_of_a_conversation_computes_what_is_new_in_it(overlap: str) -> None:
    exact, rng = exact_engine(*CACHE, overlap), random.Random(1)
    text: list[int] = []
    for turn in range(12):
        known = len(text)
        text += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        tokens, timings, computed = ask(exact, text, rng.randint(1, 7))
        # The last token of an answer was never an input.
        assert timings.cached_tokens == (known - 1 if turn else 0)
        assert computed == len(text) - timings.cached_tokens
        text += tokens
    assert_nothing_held(exact)
    exact.core.close()


@pytest.mark.parametrize("same", [1, BLOCK - 1, BLOCK, BLOCK + 3, 3 * BLOCK - 1])
def test_texts_that_part_within_a_block_share_all_that_is_the_same(same: int) -> None:
    exact, prompt = exact_engine(*CACHE), list(range(3 * BLOCK))
    ask(exact, prompt)
    _, timings, _ = ask(exact, [*prompt[:same], *[90] * 9])
    assert timings.cached_tokens == same
    exact.core.close()


def test_prompt_logprobs_are_computed_whatever_is_cached() -> None:
    exact, prompt = exact_engine(*CACHE), tuple(range(20))
    ask(exact, prompt)
    exact.core.submit(EngineRequest("r", prompt, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)))
    found: list[Any] = []
    while exact.core.has_work:
        found += exact.core.step().outputs
    assert sum(len(out.prompt_logprobs) for out in found) == len(prompt) and found[-1].timings.cached_tokens == 0
    exact.core.close()


# What may happen meanwhile ------------------------------------------------------------------------------------------


def retold(rng: random.Random, told: list[list[int]], number: int) -> list[list[int]]:
    """Texts of 1 to 60 tokens: new ones, ones that were told, and ones that begin as those and end otherwise."""
    made = []
    for _ in range(number):
        text = list(rng.choice(told)) if told and rng.random() < 0.8 else []
        if rng.random() < 0.5:
            text = text[: rng.randint(0, len(text))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        made.append(text[:60] or [1])
    return made


@few(4)
@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("kv_tokens", [4096, 240])
@pytest.mark.parametrize("steps", ["eager", "captured"])
def test_conversations_side_by_side_change_no_token_however_little_memory_there_is(
    overlap: str, drafter: str, kv_tokens: int, steps: str
) -> None:
    settings = ("kv_allocator=prefix_cache", f"drafter={drafter}", overlap, "scheduler.max_requests=6")
    exact = exact_engine(*settings, kv_tokens=kv_tokens, max_len=128, graphs=steps == "captured")
    rng, told = random.Random(3), []
    for turn in range(6):
        requests = [greedy(f"{turn}-{i}", text, rng.randint(1, 20)) for i, text in enumerate(retold(rng, told, 12))]
        outputs = run(exact.core, requests, per_step=rng.choice((2, 12)))
        assert outputs == {r.request_id: expected(r) for r in requests}
        told += [[*r.prompt, *outputs[r.request_id]] for r in requests]
        assert_nothing_held(exact)
    exact.core.close()


@pytest.mark.parametrize("overlap", OVERLAP)
def test_aborts_between_admission_and_the_first_token_leave_nothing_wrong_to_be_found(overlap: str) -> None:
    exact, rng, told = exact_engine(*CACHE, overlap, kv_tokens=400, max_len=128), random.Random(5), list[list[int]]()
    for turn in range(40):
        requests = [greedy(f"{turn}-{i}", text) for i, text in enumerate(retold(rng, told, 4))]
        outputs: dict[str, list[int]] = {r.request_id: [] for r in requests}
        for request in requests:
            exact.core.submit(request)
        for out in exact.core.step().outputs:
            outputs[out.request_id] += out.tokens
        aborted = {r.request_id for r in requests if rng.random() < 0.5}
        exact.core.abort(sorted(aborted))
        while exact.core.has_work:
            for out in exact.core.step().outputs:
                outputs[out.request_id] += out.tokens
        for request in requests:
            found, wanted = outputs[request.request_id], expected(request)
            assert found == (wanted[: len(found)] if request.request_id in aborted else wanted)
        told += [[*r.prompt, *expected(r)] for r in requests]
        assert_nothing_held(exact)
    exact.core.close()


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_hit_whose_first_step_fails_or_is_skipped_goes_on_from_its_copy(
    overlap: str, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is alone in a step that fails is to blame; those that hit run beside one that may be."""
    exact = exact_engine(*CACHE, overlap, "scheduler.max_requests=4", kv_tokens=160, max_len=128)
    prompt = list(range(30))
    ask(exact, prompt, name="first")
    forward, calls = exact.model.run, itertools.count(1)

    def failing(*arguments: Any) -> Any:
        if next(calls) == fails:
            raise RuntimeError("no kernel")
        return forward(*arguments)

    monkeypatch.setattr(exact.model, "run", failing)
    beside = greedy("beside", [i % 90 for i in range(60, 120)], 40)
    requests = [beside, greedy("again", prompt, 20), greedy("other", [*prompt[:20], 90])]
    outputs = run(exact.core, requests, per_step=1)
    assert all(outputs[r.request_id] == expected(r) for r in requests[1:])
    assert outputs["beside"] == expected(beside)[: len(outputs["beside"])]
    assert next(calls) > fails
    assert_nothing_held(exact)
    exact.core.close()


# Models -------------------------------------------------------------------------------------------------------------

FORMATS = ("kv_format=native", "kv_format=int8", "kv_format=fp8")
DRAFTING = ("none", "target", "eagle3", "parallel_block", "early_exit")
MEMORY = ("memory.kv_tokens=4096", "memory.kv_tokens=144")
PARAMS = (
    SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def texts() -> list[tuple[int, ...]]:
    """One of whole blocks and two that are not; each of them again, one that parts from it within a block, and one
    that goes on."""
    rng = random.Random(7)
    starts = [tuple(rng.randrange(90) for _ in range(length)) for length in (3 * BLOCK, 5, 2 * BLOCK + 5)]
    return [text for one in starts for text in (one, one, (*one[:-2], 91, 92, 93), (*one, *range(20)))]


@pytest.fixture(scope="module")
def uncached(models: Models) -> Callable[[str], dict[tuple[int, ...], list[tuple[int, ...]]]]:
    """Answers by text, of a run without cache or drafts, one request at a time."""

    @cache
    def answered(kv_format: str) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        core = engine(models, "Llama", *NONE, kv_format, "kv_allocator=paged", "overlap=false")
        known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for text in texts():
            for spoken in (text, conversed(core, text)):
                known[spoken] = [a.tokens for a in answers(core, [*asked(spoken)], 1)]
        core.close()
        return known

    return answered


def asked(text: tuple[int, ...]) -> list[EngineRequest]:
    """A text with each of the parameters."""
    return [EngineRequest(f"r{i}", text, params) for i, params in enumerate(PARAMS)]


def conversed(core: EngineCore, text: tuple[int, ...]) -> tuple[int, ...]:
    """A text, the answer to it, and what comes next."""
    (answer,) = answers(core, requests_for([text], PARAMS[:1]), 1)
    return (*text, *answer.tokens, 3, 1, 2)


@few(1)
@pytest.mark.parametrize("row", pairwise((FORMATS, DRAFTING, OVERLAP, MEMORY, ("1", "3"))), ids=" ".join)
def test_answers_after_cached_texts_are_those_of_a_run_without_cache(
    row: tuple[str, ...], models: Models, uncached: Callable[[str], dict[tuple[int, ...], list[tuple[int, ...]]]]
) -> None:
    kv_format, drafter, overlap, memory, batch = row
    wanted = uncached(kv_format)
    drafting = NONE if drafter == "none" else DRAFTERS[drafter](models, "Llama")
    settings = (kv_format, "kv_allocator=prefix_cache", overlap, memory, "scheduler=chunked_prefill")
    core = engine(models, "Llama", *drafting, *settings)
    again = [text for text in wanted if text not in texts()]
    requests = [r for text in [*texts(), *again] for r in asked(text)]
    requests = [EngineRequest(f"{i}", r.prompt, r.sampling) for i, r in enumerate(requests)]
    found = answers(core, requests, int(batch))
    for request, answer in zip(requests, found, strict=True):
        assert answer.tokens == wanted[request.prompt][PARAMS.index(request.sampling)]
    timings = [answer.timings for answer in found if answer.timings]
    assert sum(t.cached_tokens % BLOCK > 0 for t in timings) > len(found) // 4
    if drafter == "target":  # never wrong, if the keys that were copied for it are those of the tokens
        assert sum(t.drafted_tokens for t in timings) == sum(t.accepted_tokens for t in timings) > 0
    core.close()
