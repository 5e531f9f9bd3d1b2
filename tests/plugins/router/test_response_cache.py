from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest
from tests.plugins.router.fleets import Fleet, request, text

from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.contracts.router import Answer, ApiRequest, Attempts
from engine.service.messages_request import MessagesOptions
from engine.service.protocol import ChatRequest, CompletionRequest
from engine.service.responses_request import ResponsesOptions
from engine.testing.context import build_context
from engine.testing.router import ALIVE, ANSWER, REQUEST, RouterConformance
from engine_plugins.router.response_cache import (
    ENTRY_BYTES,
    SHAPES_NOTHING,
    ResponseCacheConfig,
    ResponseCacheRouter,
    cache_key,
    deep_size,
)

CONTEXT = build_context()
FLEET = (ALIVE,)


def make(max_entries: int = 100, max_bytes: int = 1 << 20) -> ResponseCacheRouter:
    return ResponseCacheRouter(ResponseCacheConfig(max_entries=max_entries, max_bytes=max_bytes), CONTEXT)


def prompt(i: int) -> ApiRequest:
    return replace(REQUEST, prompts=((i,),))


def hits(cache: ResponseCacheRouter, *requests: ApiRequest) -> list[bool]:
    return [isinstance(cache.place(request, FLEET), Answer) for request in requests]


class TestConformance(RouterConformance):
    def make(self) -> ResponseCacheRouter:
        return make()


def test_a_repeated_greedy_request_is_answered_from_memory():
    cache = make()
    assert cache.place(REQUEST, FLEET) == Attempts(("default",), "the first")
    cache.finished(REQUEST, ANSWER)
    assert cache.place(replace(REQUEST, request_id="again", stream=True), FLEET) == ANSWER


def test_what_was_not_answered_before_goes_where_its_beginning_is_cached():
    fleet = Fleet(make(), "abc")
    home = fleet.serve(request("first", text(1, 8)))
    for i in range(5):
        route = fleet.ask(request(i, text(1, 8) + text(i + 2, 1)))
        assert route.engines[0] == home and route.cached_tokens == (128,)


def test_a_stored_answer_needs_no_engine():
    cache = make()
    cache.finished(REQUEST, ANSWER)
    assert cache.place(REQUEST, ()) == ANSWER


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
    cache.finished(prompt(1), ANSWER)  # given again, so that now 2 is the older one
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


OTHER = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [5],
    "include_stop_str_in_output": True, "max_tokens": 3, "min_tokens": 1, "ignore_eos": True,
    "skip_special_tokens": False, "n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0}, "cache_salt": "tenant", "max_completion_tokens": 3, "logprobs": 1, "top_logprobs": 2,
    "add_generation_prompt": False, "echo": True, "best_of": 1, "model": "other",
    "chat_template_kwargs": {"a": 1}, "enable_thinking": True, "think": True, "reasoning_effort": "low",
    "return_token_ids": True, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/", "json_schema": {},
    "grammar": 'root ::= "a"', "tools": [], "tool_choice": "auto", "parallel_tool_calls": False,
    "uses_output_format": True, "functions": [], "function_call": "none", "echoed": {"instructions": "x"},
    "include_reasoning": False, "thinking_token_budget": 1,
}  # fmt: skip
"""Another value of every field of a request, the prompt apart."""


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesOptions, MessagesOptions])
def test_every_field_of_a_request_is_part_of_the_key_but_those_that_say_how_it_is_sent(kind):
    names = {field.name for field in msgspec.structs.fields(kind)} - {"prompt", "messages"}
    of_others = {"store", "previous_response_id", "cache_control"} - names
    assert names - OTHER.keys() == SHAPES_NOTHING - {"request_id", "question"} - of_others
    assert not of_others or kind is not ResponsesOptions
    keys = {cache_key(replace(REQUEST, fields={name: OTHER[name]})) for name in names & OTHER.keys()}
    assert len(keys | {cache_key(REQUEST)}) == len(names & OTHER.keys()) + 1
    same = {"stream": True, "stream_options": {"include_usage": True}, "priority": 3}
    assert cache_key(replace(REQUEST, fields=same)) == cache_key(REQUEST)


def test_every_field_of_the_contract_is_part_of_the_key_but_the_id_and_how_it_is_sent():
    other = {"kind": "completion", "model": "o", "prompts": ((9,),), "n": 2, "sampling": SamplingParams(), "echo": True}
    other |= {"cache_salt": "t", "stop": ("x",), "fields": {"x": 1}, "fingerprint": "fp_1"}
    assert {field.name for field in fields(REQUEST)} - other.keys() == {"request_id", "stream", "question"}
    keys = {cache_key(replace(REQUEST, **{name: value})) for name, value in other.items()}
    assert len(keys | {cache_key(REQUEST)}) == len(other) + 1


def test_engines_of_another_plan_answer_for_themselves():
    """Two quantizers, or one before a restart and another after it, say other things in the same words of a request."""
    cache = make()
    int8, int4 = (replace(REQUEST, fingerprint=f"fp_{name}") for name in ("int8", "int4"))
    cache.finished(int8, ANSWER)
    assert hits(cache, int8, int4) == [True, False]


def test_an_answer_grows_old_and_is_no_younger_for_being_given_again():
    now_s = [0.0]
    cache = ResponseCacheRouter(ResponseCacheConfig(ttl_s=10.0), CONTEXT, lambda: now_s[0])
    cache.finished(REQUEST, ANSWER)
    now_s[0] = 9.0
    assert hits(cache, REQUEST) == [True]
    cache.finished(REQUEST, ANSWER)
    now_s[0] = 10.5
    assert hits(cache, REQUEST) == [False]
    cache.finished(REQUEST, ANSWER)
    assert hits(cache, REQUEST) == [True]


def test_it_counts_what_was_given_again_once_that_is_finished():
    cache = make()
    for _ in range(3):
        cache.finished(REQUEST, ANSWER)
    cache.finished(prompt(2), ANSWER)
    tally = cache.tally()
    assert (tally.hits, tally.misses, tally.entries) == (2, 2, 2) and tally.bytes > 2 * ENTRY_BYTES
