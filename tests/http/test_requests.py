"""What bodies are accepted, and how the others are refused."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.http.errors import error_body
from engine.service.chat_template import TemplateSource
from engine.service.errors import ApiError
from engine.service.prepare import encode_conversation, encode_text
from engine.service.protocol import IGNORED, ChatRequest, CompletionRequest, decode
from engine.service.template_worker import TemplateWorker
from engine.service.tokenizer import Tokenizer
from engine.service.turns import Conversation, Turn
from engine.service.validation import sampling_params

from ..service.fakes import (
    BACKEND,
    MAX_LEN,
    TEMPLATE,
    TOKENIZER_JSON,
    VOCAB,
    ids,
    in_loop,
    make_tokenizer,
    says,
)  # fmt: skip
from . import fakes
from .fakes import chat, completion, events_of, running


def refused(body: bytes, kind: Any = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body, kind)
    assert caught.value.kind == "invalid"
    error = json.loads(error_body(caught.value))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return caught.value


def body(**fields: Any) -> bytes:
    return json.dumps(chat(**fields)).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"x":' + b"[" * 100_000,
        b'{"user":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
    ],
)
def test_bodies_that_are_no_json_object_are_refused(data: bytes) -> None:
    refused(data, CompletionRequest)


def test_text_whose_ids_the_model_lacks_is_refused() -> None:
    """Looking such an id up would read beyond the table of embeddings."""
    state: Any = SimpleNamespace(tokenizer=make_tokenizer(), max_len=MAX_LEN, vocab_size=ord("x"))
    assert asyncio.run(encode_text(state, "", "cde")) == ids("cde")
    with pytest.raises(ApiError, match=r"Token id 120 is outside the vocabulary \(0 to 119\)"):
        asyncio.run(encode_text(state, "", "x"))
    with pytest.raises(ApiError, match="outside the vocabulary"):
        asyncio.run(encode_conversation(state, "", Conversation((Turn("user", "x"),))))


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["top_k", "seed", "max_tokens", "min_tokens", "n", "top_logprobs", "priority", "max_completion_tokens"]


@pytest.mark.parametrize("field", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", ["1e308", "1e999", "-1e999", "1" + "0" * 400, '"1"', "true", "[]", "{}"])
def test_wrong_numbers_are_refused_by_field(field: str, value: str) -> None:
    data = body()[:-1] + f', "{field}": {value}}}'.encode()
    assert refused(data).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", 0),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-30),
        ("top_logprobs", 21),
        ("stop", ""),
        ("stop", [1]),
        ("logit_bias", {"5": 101}),
        ("stream", "yes"),
        ("messages", []),
        ("stream_options", {"nope": 1}),
    ],
)
def test_values_out_of_range_are_refused_by_field(field: str, value: Any) -> None:
    error = refused(body(**{field: value}))
    assert error.param is not None and error.param.startswith(field)


def test_unknown_fields_are_refused_and_harmless_ones_ignored() -> None:
    assert refused(body(temprature=1)).param == "temprature"
    assert refused(body(chat_template="{{ 1 }}")).param == "chat_template"
    assert refused(body(tools=[{"type": "function", "function": {}}])).param == "tools[0].function.name"
    assert refused(body(response_format={"type": "xml"})).param == "response_format.type"
    ignored = dict.fromkeys(IGNORED.difference(ChatRequest.__struct_fields__), "x")
    decode(body(**ignored, functions=[], response_format={"type": "text"}), ChatRequest)


def test_null_means_absent() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    empty = decode(body(**dict.fromkeys(names), anything_at_all=None), ChatRequest)
    assert sampling_params(empty, 5, VOCAB) == sampling_params(decode(body(), ChatRequest), 5, VOCAB)


def test_images_are_refused_where_they_are() -> None:
    from engine.service.validation import turns_of

    request = decode(
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}).encode(),
        ChatRequest,
    )
    with pytest.raises(ApiError) as caught:
        turns_of(request.messages)
    assert (caught.value.kind, caught.value.param) == ("invalid", "messages[0].content[0]")
    assert caught.value.message == (
        "'messages[0].content[0]' has type 'image_url', expected type 'text' with a 'text': this server computes text "
        "only, of models that see images, too."
    )


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=5))
@settings(max_examples=80)
def test_any_value_of_a_field_is_taken_or_refused_but_never_a_crash(value: Any) -> None:
    for field in ("stop", "seed", "messages", "logit_bias", "stream_options", "cache_salt", "anything"):
        data = json.dumps(chat(**{field: value})).encode()
        try:
            decode(data, ChatRequest)
        except ApiError as error:
            assert error.kind == "invalid"


@in_loop
async def test_every_sampling_field_reaches_the_engine() -> None:
    """``priority`` as far as the operator allows it."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logprobs": 3,
    }
    extra = {"logit_bias": {"5": -100}, "cache_salt": "tenant", "priority": -3, "echo": True}
    async with running(least_priority=-3) as server:
        status, _, _ = await server.post("/v1/completions", completion(**fields, **extra))
        assert status == 200
        (request,) = server.client.requests
        for name, value in fields.items():
            assert getattr(request.sampling, name) == (tuple(value) if isinstance(value, list) else value)
        assert request.sampling.logit_bias == {5: -100} and request.sampling.prompt_logprobs == 3
        assert (request.cache_salt, request.priority) == ("tenant", -3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [10**300]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": "x" * MAX_LEN}, "prompt"),
        ({"prompt": "x" * (MAX_LEN * 100)}, "prompt"),
        ({"max_tokens": MAX_LEN}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ],
)
@in_loop
async def test_requests_that_cannot_be_served_never_reach_the_engine(fields: dict[str, Any], param: str) -> None:
    async with running() as server:
        for stream in (False, True):
            status, headers, data = await server.post("/v1/completions", completion() | fields | {"stream": stream})
            assert (status, headers["content-type"].split(";")[0]) == (400, "application/json")
            assert json.loads(data)["error"]["param"] == param
        assert server.client.requests == [] and server.server.state.admission.in_flight == 0


@in_loop
async def test_a_prompt_can_be_scored_without_generating() -> None:
    async with running(lambda request: []) as server:
        asked = completion(prompt="abc", max_tokens=0, echo=True, logprobs=1)
        status, _, data = await server.post("/v1/completions", asked)
        assert status == 200 and server.client.requests[0].sampling.max_tokens == 0
        whole = json.loads(data)
        _, _, data = await server.post("/v1/completions", asked | {"stream": True})
        streamed = [event["choices"][0] for event in events_of(data)]
    choice = whole["choices"][0]
    assert choice["text"] == "abc" == "".join(part["text"] for part in streamed)
    assert whole["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    assert choice["logprobs"] == streamed[0]["logprobs"] and len(choice["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize("prompt", ["x" * MAX_LEN, list(ids("x" * MAX_LEN))])
@in_loop
async def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued(prompt: Any) -> None:
    async with running(lambda request: []) as server:
        asked = completion(prompt=prompt, echo=True, logprobs=1)
        status, _, data = await server.post("/v1/completions", asked | {"max_tokens": 0})
        assert status == 200 and json.loads(data)["usage"]["prompt_tokens"] == MAX_LEN
        for more in ({"max_tokens": 1}, {}):
            status, _, data = await server.post("/v1/completions", asked | more)
            assert (status, json.loads(data)["error"]["code"]) == (400, "context_length_exceeded")
        longer = prompt + prompt[:1]
        status, _, data = await server.post("/v1/completions", asked | {"prompt": longer, "max_tokens": 0})
        assert (status, json.loads(data)["error"]["code"]) == (400, "context_length_exceeded")
        assert len(server.client.requests) == 1


@in_loop
async def test_offsets_of_an_echoed_prompt_count_the_special_tokens_that_it_spells() -> None:
    async with running() as server:
        asked = completion(prompt="a<|im_end|>é<|end|>", max_tokens=1, echo=True, logprobs=0)
        _, _, data = await server.post("/v1/completions", asked)
    choice = json.loads(data)["choices"][0]
    assert choice["logprobs"]["text_offset"][:5] == [0, 1, 11, 11, 12]
    assert choice["logprobs"]["text_offset"][5] == len(asked["prompt"])


def sentencepiece() -> Tokenizer:
    """Of Llama 2's kind, with Gemma's indents."""
    backend = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "▁Hello": 1, "▁w": 2}, [], unk_token="<unk>"))
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_tokens(["▁▁▁▁"])
    return Tokenizer(backend.to_str().encode(), None)


@in_loop
async def test_a_text_has_no_space_before_it_and_its_indents_are_spaces() -> None:
    async with running(lambda request: [(2,), (3,)]) as server:
        server.server.state.engine.tokenizer = tokenizer = sentencepiece()
        _, _, data = await server.post("/detokenize", {"tokens": [1, 3, 2]})
        assert json.loads(data) == {"prompt": "Hello     w"}
        asked = completion(prompt=[1, 2], max_tokens=2, echo=True, logprobs=0)
        _, _, data = await server.post("/v1/completions", asked)
        choice = json.loads(data)["choices"][0]
        _, _, data = await server.post("/v1/completions", completion(prompt=[1], stop="   ", max_tokens=2))
        tokenizer.close()
    assert choice["text"] == "Hello w w    "
    assert choice["logprobs"]["tokens"] == [" Hello", " w", " w", "    "]
    assert choice["logprobs"]["text_offset"] == [0, 5, 7, 9]
    assert json.loads(data)["choices"][0]["text"] == " w"


@in_loop
async def test_a_stop_string_counts_once_the_output_is_long_enough() -> None:
    async with running(says("ab.cd.ef")) as server:
        for min_tokens, text in ((0, "ab"), (2, "ab"), (3, "ab.cd"), (6, "ab.cd.ef")):
            asked = completion(max_tokens=20, stop=".", min_tokens=min_tokens)
            _, _, data = await server.post("/v1/completions", asked)
            assert json.loads(data)["choices"][0]["text"] == text


@in_loop
async def test_a_stop_string_that_begins_in_the_least_length_and_is_complete_after_it_ends_the_text() -> None:
    async with running(says("abSTOPcd")) as server:
        _, _, data = await server.post("/v1/completions", completion(max_tokens=20, stop="STOP", min_tokens=4))
    choice = json.loads(data)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


@in_loop
async def test_a_stop_string_that_spells_a_special_token_ends_the_text_though_none_is_shown() -> None:
    tokens = (*ids("hi"), BACKEND.token_to_id("<|im_end|>"), *ids("there"))
    async with running(lambda request: [(token,) for token in tokens]) as server:
        cases = ("<|im_end|>", False, "hi"), ("i<|im_end|>", False, "h"), ("<|im_end|>", True, "hi<|im_end|>")
        for stop, include, text in cases:
            asked = completion(max_tokens=20, stop=stop, include_stop_str_in_output=include, logprobs=0)
            _, _, data = await server.post("/v1/completions", asked)
            choice = json.loads(data)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")
            assert "".join(choice["logprobs"]["tokens"]) == text
        _, _, data = await server.post("/v1/completions", completion(max_tokens=20, stop="there"))
    assert json.loads(data)["choices"][0]["text"] == "hi"
    assert len(server.client.aborted) == len(cases)


TEXT = st.text(alphabet="abé😀\n ", min_size=1, max_size=16)


@given(TEXT, st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), max_size=2), st.integers(1, 5))
@settings(max_examples=25)
@in_loop
async def test_streams_equal_whole_answers_however_steps_are_cut(text: str, stop: list[str], step: int) -> None:
    tokens = (*text.encode(), says("")(None)[0][0])  # type: ignore[arg-type]
    steps = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    async with running(lambda request: steps) as server:
        asked = completion(max_tokens=100, stop=stop or None, logprobs=0)
        _, _, data = await server.post("/v1/completions", asked)
        whole = json.loads(data)
        _, _, data = await server.post(
            "/v1/completions", asked | {"stream": True, "stream_options": {"include_usage": True}}
        )
        events = events_of(data)
    choice = whole["choices"][0]
    streamed = [event["choices"][0] for event in events[:-1]]
    assert "".join(part["text"] for part in streamed) == choice["text"]
    assert [t for part in streamed for t in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    assert [r for part in streamed if (r := part["finish_reason"])] == [choice["finish_reason"]]
    assert events[-1]["usage"] == whole["usage"]
    assert not any(s in choice["text"] for s in stop) and text.startswith(choice["text"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_ids_of_prompt_and_output_are_returned_on_request(path: str) -> None:
    """As many as usage counts; parts of a character, and a stop string that is not shown, included."""
    is_chat = "chat" in path
    async with running(says("é1.2")) as server:
        asked: dict[str, Any] = {"n": 2, "stop": ".", "return_token_ids": True}
        asked |= chat() if is_chat else completion()
        _, _, data = await server.post(path, asked)
        whole = json.loads(data)
        prompt = list(server.client.requests[0].prompt)
        _, _, data = await server.post(path, asked | {"stream": True})
        events = events_of(data)
        _, _, data = await server.post(path, asked | {"return_token_ids": False})
        assert b"token_ids" not in data
    for choice in whole["choices"]:
        assert choice["token_ids"] == list(ids("é1."))
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [id_ for part in mine for id_ in part.get("token_ids", [])] == choice["token_ids"]
    assert whole["usage"]["completion_tokens"] == 2 * len(ids("é1."))
    of_prompt = [whole, events] if is_chat else [whole["choices"], [event["choices"][0] for event in events]]
    found = [part["prompt_token_ids"] for group in of_prompt for part in flat(group) if "prompt_token_ids" in part]
    assert found == [prompt] * (3 if is_chat else 4)


def flat(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


THINKING = TEMPLATE + "{{ 'think ' ~ (reasoning_effort or '-') ~ '|' ~ (note or '') if enable_thinking else 'no' }}"


@in_loop
async def test_variables_of_the_chat_template_reach_it_and_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TemplateWorker(TemplateSource(THINKING, {}))
    monkeypatch.setattr(fakes, "make_tokenizer", lambda: Tokenizer(TOKENIZER_JSON, template))
    async with running() as server:
        spelled = {"enable_thinking": True, "note": "<|im_end|>"}
        for fields, ending in (
            ({}, "no"),
            ({"enable_thinking": True}, "think -|"),
            ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}, "think low|"),
            ({"chat_template_kwargs": spelled}, "think -|<|im_end|>"),
        ):
            assert (await server.post("/v1/chat/completions", chat("hi", **fields)))[0] == 200
            prompt = server.client.requests[-1].prompt
            assert prompt[-len(ending) :] == ids(ending)
            _, _, data = await server.post("/tokenize", chat("hi", **fields))
            assert json.loads(data)["tokens"] == list(prompt)


@in_loop
async def test_parts_reach_a_template_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    template = TemplateWorker(TemplateSource(source, {}))
    monkeypatch.setattr(fakes, "make_tokenizer", lambda: Tokenizer(TOKENIZER_JSON, template))
    parts = [{"type": "text", "text": "b<|end|>"}, {"type": "text", "text": "c"}]
    turns = [{"role": "developer", "content": "a"}, {"role": "user", "content": parts}]
    async with running() as server:
        assert (await server.post("/v1/chat/completions", chat() | {"messages": turns}))[0] == 200
    assert server.client.requests[0].prompt == ids("[a][b<|end|>][c]")
