from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.contracts.router import Answer, ApiRequest, ToEngine
from engine.testing.context import build_context
from engine.testing.router import ALIVE, ANSWER, REQUEST, RouterConformance
from engine_plugins.router.config import ResponseCacheConfig
from engine_plugins.router.response_cache import ENTRY_BYTES, ResponseCacheRouter, cache_key, deep_size

CONTEXT = build_context()
FLEET = (ALIVE,)


def make(max_entries: int = 100, max_bytes: int = 1 << 20) -> ResponseCacheRouter:
    return ResponseCacheRouter(ResponseCacheConfig(max_entries=max_entries, max_bytes=max_bytes), CONTEXT)


def prompt(i: int) -> ApiRequest:
    return replace(REQUEST, prompts=((i,),))


def hits(cache: ResponseCacheRouter, *requests: ApiRequest) -> list[bool]:
    return [isinstance(cache.route(request, FLEET), Answer) for request in requests]


class TestConformance(RouterConformance):
    def make(self) -> ResponseCacheRouter:
        return make()


def test_a_repeated_greedy_request_is_answered_from_memory():
    cache = make()
    assert cache.route(REQUEST, FLEET) == ToEngine("default")
    cache.finished(REQUEST, ANSWER)
    assert cache.route(replace(REQUEST, request_id="again", stream=True), FLEET) == ANSWER


def test_a_stored_answer_needs_no_engine():
    cache = make()
    cache.finished(REQUEST, ANSWER)
    assert cache.route(REQUEST, ()) == ANSWER


def test_a_seeded_request_is_answered_from_memory_for_that_seed_only():
    seeded = replace(REQUEST, sampling=SamplingParams(temperature=0.8, seed=7))
    cache = make()
    cache.finished(seeded, ANSWER)
    assert hits(cache, seeded, replace(REQUEST, sampling=SamplingParams(temperature=0.8, seed=8))) == [True, False]


@pytest.mark.parametrize("field", [f for f in SamplingParams.__struct_fields__ if f != "seed"])
def test_every_sampling_parameter_is_part_of_the_key(field):
    other = {"logit_bias": {1: 2.0}, "stop_token_ids": (5,), "ignore_eos": True, "top_p": 0.5, "temperature": 0.5}
    default = getattr(SamplingParams(), field)
    value = other.get(field, (default or 0) + 1)
    changed = msgspec.structs.replace(REQUEST.sampling, **{field: value})
    assert cache_key(replace(REQUEST, sampling=changed)) != cache_key(REQUEST)


def test_the_order_of_logit_biases_does_not_matter():
    keys = {
        cache_key(replace(REQUEST, sampling=SamplingParams(temperature=0.0, logit_bias=bias)))
        for bias in ({1: 1.0, 2: 2.0}, {2: 2.0, 1: 1.0})
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    "choices",
    [
        (),
        ({"tokens": (7,), "finish_reason": "abort"},),
        ({"tokens": (7,), "finish_reason": "error"},),
        ({"tokens": (7,), "finish_reason": None},),
        ({"tokens": (7,)},),
        (*ANSWER.choices, *ANSWER.choices),
    ],
)
def test_partial_answers_are_not_kept(choices):
    cache = make()
    cache.finished(REQUEST, Answer(choices))
    assert hits(cache, REQUEST) == [False]


def test_the_least_recently_used_entry_goes_first():
    cache = make(max_entries=2)
    cache.finished(prompt(1), ANSWER)
    cache.finished(prompt(2), ANSWER)
    assert hits(cache, prompt(1)) == [True]  # now 2 is the older one
    cache.finished(prompt(3), ANSWER)
    assert hits(cache, prompt(1), prompt(2), prompt(3)) == [True, False, True]


def test_bytes_are_bounded_also_when_an_entry_is_replaced():
    size = ENTRY_BYTES + deep_size(ANSWER.choices)
    cache = make(max_bytes=2 * size)
    for _ in range(10):
        cache.finished(prompt(1), ANSWER)
    cache.finished(prompt(2), ANSWER)
    assert hits(cache, prompt(1), prompt(2)) == [True, True]
    cache.finished(prompt(3), ANSWER)
    assert hits(cache, prompt(2), prompt(3), prompt(1)) == [True, True, False]


def test_an_answer_larger_than_the_cache_displaces_nothing():
    cache = make(max_bytes=ENTRY_BYTES + deep_size(ANSWER.choices))
    cache.finished(prompt(1), ANSWER)
    cache.finished(prompt(2), Answer(({"tokens": tuple(range(5000)), "finish_reason": "length"},)))
    assert hits(cache, prompt(1), prompt(2)) == [True, False]


def test_the_size_of_an_answer_counts_its_logprobs():
    plain = deep_size(({"tokens": (1,), "logprobs": ()},))
    rich = deep_size(({"tokens": (1,), "logprobs": (TokenLogprobs(1, -0.5, tuple((i, -1.0) for i in range(20))),)},))
    assert rich - plain > 20 * 64
