"""Law 1 for drafters, in float32: whoever drafts, on whatever model and beside whatever plugins, every token, reason
and logprob is what the same model gives without drafts, one request at a time.

Every two values of :data:`FACTORS` meet in a set here; ``-m slow`` runs them all, with three times the prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from engine.contracts.request import SamplingParams
from engine.loop.core import EngineCore
from tests.selection import few

from .drafted import DRAFTERS, MODELS, NONE, Answer, Models, answers, engine, pairwise, prompts, requests_for

QUANTIZERS = ("quantizer=none", "quantizer=int8")
FACTORS = (
    tuple(DRAFTERS),
    MODELS,
    ("kv_allocator=paged", "kv_allocator=prefix_cache"),
    ("scheduler=continuous", "scheduler=chunked_prefill scheduler.token_budget=21"),
    ("overlap=true", "overlap=false"),
    ("1", "4", "16"),
    ("attention_kernel=auto", "attention_kernel=torch"),
    QUANTIZERS,
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=20, stop_token_ids=tuple(range(0, 120, 9)), min_tokens=5),
    SamplingParams(temperature=0.7, seed=3, min_p=0.05, logprobs=2),
    SamplingParams(temperature=0.6, seed=4, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={7: 2.0, 11: -3.0}, logprobs=1),
)
Row = tuple[str, ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(models: Models) -> Callable[[str, str, int], tuple[list[Answer], list[Answer]]]:
    @cache
    def answered(model: str, quantizer: str, count: int) -> tuple[list[Answer], list[Answer]]:
        core = engine(models, model, *NONE, quantizer, "kv_allocator=paged", "overlap=false")
        found = both(core, prompts(models, model, count), 1)
        core.close()
        return found

    return answered


def both(core: EngineCore, texts: Sequence[tuple[int, ...]], batch: int) -> tuple[list[Answer], list[Answer]]:
    """Greedy answers to all texts and sampled ones to half of them."""
    greedy = answers(core, requests_for(texts, [GREEDY]), batch)
    return greedy, answers(core, requests_for(texts[::2], SAMPLED, max_tokens=10, ignore_eos=True), batch)


def assert_same(found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    assert [(a.tokens, a.reason) for a in found] == [(a.tokens, a.reason) for a in wanted]
    for a, b in zip(found, wanted, strict=True):
        for one, other in zip(a.logprobs, b.logprobs, strict=True):
            assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def check(row: Row, models: Models, reference: Callable[..., tuple[list[Answer], list[Answer]]], count: int) -> None:
    drafter, model, allocator, scheduler, overlap, batch, attention, quantizer = row
    settings = (allocator, *scheduler.split(), overlap, attention, quantizer)
    core = engine(models, model, *DRAFTERS[drafter](models, model), *settings)
    greedy, sampled = both(core, prompts(models, model, count), int(batch))
    core.close()
    for found, wanted in zip((greedy, sampled), reference(model, quantizer, count), strict=True):
        assert_same(found, wanted)
    assert sum(answer.timings.drafted_tokens for answer in (*greedy, *sampled) if answer.timings) > 0


@few(2)
@pytest.mark.parametrize("row", sorted(pairwise(FACTORS), key=lambda row: (row[1], row[-1])), ids=" ".join)
def test_drafts_change_no_token(
    row: Row, models: Models, reference: Callable[..., tuple[list[Answer], list[Answer]]]
) -> None:
    check(row, models, reference, 14)


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(itertools.product(*FACTORS), key=lambda row: (row[1], row[-1])), ids=" ".join)
def test_drafts_change_no_token_in_the_full_product(
    row: Row, models: Models, reference: Callable[..., tuple[list[Answer], list[Answer]]]
) -> None:
    check(row, models, reference, 42)
