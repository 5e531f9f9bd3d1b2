"""What may happen while drafts are under way: ends, borders, preemptions and aborts. No token changes, nothing leaks,
and a draft model that is the target stays right: its keys are those of the tokens, whatever happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from engine import LLM
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from tests.selection import few

from .drafted import DRAFTERS, NONE, Answer, Models, answers, assert_idle, engine, prompts, requests_for

WIDE = "drafter.max_width=6"
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
DEVICE_DRAFTERS = ("stranger", "early_exit", "target", "eagle3", "parallel_block")
Make = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


ONE_OF_EACH_KIND = ("ngram", "target", "eagle3")
DRAFTERS_AND_OVERLAP = [
    *((name, "true") for name in DRAFTERS),
    *(pytest.param(name, "false", marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow) for name in DRAFTERS),
]
"""Every drafter with overlap; without it those of texts, of a model and of a head."""


@pytest.fixture(scope="module")
def drafting(models: Models) -> Make:
    """A tiny Llama with a drafter."""

    def make(drafter: str, *overrides: str) -> EngineCore:
        return engine(models, "Llama", *DRAFTERS[drafter](models, "Llama"), WIDE, *overrides)

    return make


@pytest.fixture(scope="module")
def texts(models: Models) -> list[tuple[int, ...]]:
    return prompts(models, "Llama", 12, seed=3)


@pytest.fixture(scope="module")
def undrafted(models: Models, texts: list[tuple[int, ...]]) -> Callable[[int], list[tuple[int, ...]]]:
    @cache
    def outputs(max_tokens: int) -> list[tuple[int, ...]]:
        core = engine(models, "Llama", *NONE)
        found = answers(core, requests_for(texts, [GREEDY], max_tokens=max_tokens), 1)
        core.close()
        return [answer.tokens for answer in found]

    return outputs


def counts(found: list[Answer]) -> tuple[int, int]:
    """(drafted, accepted) tokens of all."""
    timings = [answer.timings for answer in found if answer.timings]
    return sum(t.drafted_tokens for t in timings), sum(t.accepted_tokens for t in timings)


@few(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_inside_a_draft_ends_the_output_there(
    drafter: str, drafting: Make, texts: list[tuple[int, ...]], undrafted: Callable[[int], list[tuple[int, ...]]]
) -> None:
    core = drafting(drafter)
    for place in (3, 4, 5, 6):
        outputs = undrafted(30)
        stops = [output[place] for output in outputs]
        requests = [
            EngineRequest(f"{place} {i}", text, SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
            for i, (text, stop) in enumerate(zip(texts, stops, strict=True))
        ]
        found = answers(core, requests, 4)
        wanted = [output[: output.index(stop) + 1] for output, stop in zip(outputs, stops, strict=True)]
        assert [(a.tokens, a.reason) for a in found] == [(tokens, "stop") for tokens in wanted]
    core.close()


@few(2)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_token_limit_inside_a_draft_is_kept(
    drafter: str, drafting: Make, texts: list[tuple[int, ...]], undrafted: Callable[[int], list[tuple[int, ...]]]
) -> None:
    core = drafting(drafter)
    for limit in range(1, 10):
        found = answers(core, requests_for(texts[:4], [GREEDY], max_tokens=limit), 4)
        assert [(a.tokens, a.reason) for a in found] == [(tokens[:limit], "length") for tokens in undrafted(30)[:4]]
    core.close()


@few(2)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_tiny_context_ends_outputs_at_its_last_token(drafter: str, models: Models, drafting: Make) -> None:
    text = tuple(range(40))
    requests = [EngineRequest(f"{n}", text[:n], SamplingParams(max_tokens=99, temperature=0.0)) for n in range(1, 12)]
    tiny, plain = drafting(drafter, "model.max_len=12"), engine(models, "Llama", *NONE, "model.max_len=12")
    found, wanted = answers(tiny, requests, 4), answers(plain, requests, 1)
    assert [(a.tokens, a.reason) for a in found] == [(a.tokens, a.reason) for a in wanted]
    assert [len(a.tokens) for a in found] == [12 - n for n in range(1, 12)]
    tiny.close(), plain.close()


@few(1)
@pytest.mark.parametrize(("drafter", "overlap"), DRAFTERS_AND_OVERLAP)
def test_requests_preempted_with_drafts_under_way_go_on_with_the_same_tokens(
    drafter: str,
    overlap: str,
    drafting: Make,
    texts: list[tuple[int, ...]],
    undrafted: Callable[[int], list[tuple[int, ...]]],
) -> None:
    core = drafting(drafter, "memory.kv_tokens=184", "kv_allocator=paged", "scheduler=continuous", f"overlap={overlap}")
    found = answers(core, requests_for(texts, [GREEDY]), 12)
    assert [a.tokens for a in found] == undrafted(30)
    assert sum(a.timings.preemptions for a in found if a.timings) > 0
    core.close()


@few(2)
@pytest.mark.parametrize(("drafter", "overlap"), DRAFTERS_AND_OVERLAP)
def test_aborts_with_drafts_under_way_disturb_nobody_and_give_everything_back(
    drafter: str,
    overlap: str,
    drafting: Make,
    texts: list[tuple[int, ...]],
    undrafted: Callable[[int], list[tuple[int, ...]]],
) -> None:
    core = drafting(drafter, f"overlap={overlap}")
    requests = requests_for(texts, [GREEDY])
    outputs: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    aborted = set[str]()
    for request in requests:
        core.submit(request)
    steps = 0
    while core.has_work:
        steps += 1
        if steps > 2 and len(aborted) < 6:
            core.abort([f"r{2 * len(aborted)}"])
            aborted.add(f"r{2 * len(aborted)}")
        for out in core.step().outputs:
            outputs[out.request_id] += out.tokens
    for request, wanted in zip(requests, undrafted(30), strict=True):
        got = outputs[request.request_id]
        assert got == (wanted[: len(got)] if request.request_id in aborted else wanted)
    assert any(0 < len(outputs[request_id]) < 30 for request_id in aborted)
    assert_idle(core)
    core.close()


@few(2)
@pytest.mark.parametrize("budget", [9, 15, 16, 17, 64])
def test_a_draft_model_that_is_the_target_is_never_wrong_wherever_prompts_are_cut(
    budget: int,
    drafting: Make,
    texts: list[tuple[int, ...]],
    undrafted: Callable[[int], list[tuple[int, ...]]],
) -> None:
    core = drafting("target", "scheduler=chunked_prefill", f"scheduler.token_budget={budget}")
    for _ in range(2):  # the second time after cached prefixes
        found = answers(core, requests_for(texts, [GREEDY]), 4)
        drafted, accepted = counts(found)
        assert [a.tokens for a in found] == undrafted(30)
        assert accepted == drafted > 0
    assert sum(a.timings.cached_tokens for a in found if a.timings) > 0
    core.close()


@few(1)
@pytest.mark.parametrize("drafter", DEVICE_DRAFTERS)
def test_drafts_are_as_good_after_a_prefix_hit_a_chunk_border_or_beside_others(
    drafter: str, drafting: Make, texts: list[tuple[int, ...]]
) -> None:
    requests = requests_for(texts[:6], [GREEDY])
    # With overlap, how many drafts an output's last steps have depends on what was in flight.
    whole = drafting(drafter, "overlap=false")
    cut = drafting(drafter, "overlap=false", "scheduler=chunked_prefill", "scheduler.token_budget=16")
    runs = ((whole, 1), (whole, 1), (cut, 1), (cut, 6))
    accepted = [counts(answers(core, requests, batch))[1] for core, batch in runs]
    assert accepted == accepted[:1] * 4
    whole.close(), cut.close()


@few(1)
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "early_exit", "target"])
def test_a_stop_string_inside_a_draft_ends_the_text_there(drafter: str, models: Models) -> None:
    settings = ("device=cpu", "threads=1", "model.dtype=float32", "model.max_len=512", "exporter=[]")
    plain = LLM("bundled", overrides=[*settings, *NONE])
    fixed = DRAFTERS[drafter](models, "bundled")
    drafting = LLM("bundled", overrides=[*settings, *fixed, WIDE, "drafter.adaptive=false"])
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    prompt = "import os\nimport os\nimport"
    text = plain.generate([prompt], **sampling)[0].text
    for stop in (text[20:23], text[31:32], text[50:58]):
        results = [
            [(c.text, c.tokens, c.finish_reason) for c in llm.generate([prompt], stop=[stop], **sampling)]
            for llm in (plain, drafting)
        ]
        assert results[0] == results[1] and results[0][0][2] == "stop" and stop not in results[0][0][0]
    assert drafting.stats().blocks_leased == 0
    plain.close(), drafting.close()
