"""Requests that bring a prompt and want token ids: ``engine.service.generate_request``."""

from __future__ import annotations

from typing import Any

import pytest

from engine.service.engines import EngineHandle
from engine.service.errors import ApiError
from engine.service.generate_request import generate_options, generate_prompts

from .fakes import MAX_LEN, VOCAB, ScriptedClient, ids, in_loop, make_plan, make_tokenizer


def engine(**server: Any) -> EngineHandle:
    return EngineHandle("default", make_plan(**server), ScriptedClient(), make_tokenizer())


def test_log_probabilities_are_asked_for_once_with_the_larger_number() -> None:
    for fields, count, echoes in (
        ({}, None, False),
        ({"logprobs": 0}, 0, False),
        ({"prompt_logprobs": 3}, 3, True),
        ({"logprobs": 5, "prompt_logprobs": 3}, 5, True),
    ):
        options = generate_options(dict(fields), engine())
        assert (options.num_logprobs(), options.echoes) == (count, echoes)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"n": 9}, "n"),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias"),
    ],
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        generate_options(fields, engine(max_n=8))
    assert (caught.value.kind, caught.value.param) == ("invalid", param)


@in_loop
async def test_a_prompt_is_text_or_ids_of_the_model() -> None:
    assert (await generate_prompts(engine(), "me", "hi")).tokens == (ids("hi"),)
    assert (await generate_prompts(engine(), "me", (1, 2))).tokens == ((1, 2),)
    for prompt in ((VOCAB,), (1,) * (MAX_LEN + 1), "a" * 10_000):
        with pytest.raises(ApiError) as caught:
            await generate_prompts(engine(), "me", prompt)
        assert (caught.value.kind, caught.value.param) == ("invalid", "prompt")
