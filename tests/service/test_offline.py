"""Offline generation: what makes no sense is refused by name, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine import LLM
from engine.assembly.errors import AssemblyError
from engine.contracts.constraint import Grammar
from engine.loop.messages import EngineStats
from engine.service.offline import GenerationFailed


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("bundled", overrides=["+preset=latency", "device=cpu", "threads=1"])
    yield llm
    llm.close()


def test_several_engines_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(AssemblyError, match=r"fleet\.replicas=2: here is one engine without a server; leave it out"):
        LLM("bundled", overrides=["device=cpu", "fleet.replicas=2"])


def test_calls_from_several_threads_run_one_after_another(llm: LLM) -> None:
    prompts = [[i + 1, i + 2, i + 3] for i in range(4)]
    alone = [llm.generate([p], max_tokens=8, temperature=0.0)[0].tokens for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda p: llm.generate([p], max_tokens=8, temperature=0.0)[0].tokens, prompts)
    assert list(together) == alone


def test_a_conversation_of_parts_is_answered_as_its_text_is(llm: LLM) -> None:
    said = "You are\nhelpful", "What does json.dumps do?"
    as_text, as_parts = (
        llm.chat(
            [{"role": role, "content": content(text)} for role, text in zip(("system", "user"), said)],
            chat_template_kwargs={"enable_thinking": False},
            max_tokens=12,
            temperature=0.0,
        )
        for content in (str, lambda text: [{"type": "text", "text": line} for line in text.split("\n")])
    )
    assert as_text.tokens == as_parts.tokens


PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "now")]
HI = [{"role": "user", "content": "hi"}]


def test_a_chat_with_tools_calls_them(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 60, "temperature": 0.0}
    done = llm.chat(HI, tool_choice={"type": "function", "function": {"name": "now"}}, **asked)
    (call,) = done.calls
    assert call.name == "now" and json.loads(call.arguments)["a"] in (1, 2) and call.id
    assert (done.text, done.finish_reason) == ("", "stop")
    some = llm.chat(HI, tool_choice="required", **asked)
    assert {call.name for call in some.calls} <= {"add", "now"} and len(some.calls) > 0
    none = llm.chat(HI, tool_choice="none", **asked)
    assert none.calls == () and none.text


def test_a_grammar_beside_tools_is_that_of_an_output_that_calls_none(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"b": {"const": "x"}}, "required": ["b"], "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema))
    done = llm.chat(HI, tools=TOOLS, grammar=grammar, max_tokens=60, temperature=0.0)
    assert done.calls or json.loads(done.text) == {"b": "x"}
    with pytest.raises(ValueError, match="grammar='x'"):
        llm.chat(HI, tools=TOOLS, grammar="x")
    with pytest.raises(ValueError, match="only a JSON schema"):
        llm.chat(HI, tools=TOOLS, grammar=Grammar("regex", "a+"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS + TOOLS}, "two functions have the same name"),
        ({"tools": [{"type": "custom"}]}, "only functions are supported"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "Invalid value for 'tool_choice'"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_in_the_words_of_the_server(
    llm: LLM, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(HI, **fields)


@pytest.mark.parametrize(
    ("message", "fields", "words"),
    [
        ({"content": [{"type": "image", "image": "x"}]}, {}, "'messages[0].content[0]' has type 'image'"),
        ({"role": "critic", "content": "x"}, {}, "Invalid value for 'messages[0].role'"),
        ({"role": "tool", "content": "x"}, {}, "'messages[0].tool_call_id' is missing."),
        (
            {"content": "x", "tool_calls": [{"function": {"name": "x"}}]},
            {},
            "'messages[0].tool_calls': only an assistant calls tools.",
        ),
        ({"content": "x", "text": "y"}, {}, "Unknown field 'messages[0].text'."),
        ({"content": "x"}, {"messages": []}, "'chat_template_kwargs.messages' is not a variable"),
        ({"content": 1}, {}, "Invalid value for 'messages[0].content'"),
        ({"content": object()}, {}, "The conversation cannot be written as JSON"),
        ({"content": "\ud800"}, {}, "The conversation cannot be written as JSON"),
    ],
)
def test_a_conversation_that_the_server_refuses_is_refused_in_its_words(
    llm: LLM, message: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        llm.chat([{"role": "user"} | message], chat_template_kwargs=fields)
    assert str(caught.value).startswith(words)


def nothing_is_held(stats: EngineStats) -> bool:
    return (stats.blocks_leased, stats.rows_used, stats.running, stats.waiting) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", None),
        ("min_tokens", 99),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", -2),
        ("seed", 1.5),
        ("logprobs", -1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {10**9: 1.0}),
        ("logit_bias", {5: float("inf")}),
        ("logit_bias", {5: float("nan")}),
        ("stop_token_ids", [-1]),
        ("stop", [""]),
        ("stop", 5),
        ("priority", "high"),
        ("priority", True),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("max_tokns", 5),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        llm.generate(["a"], **{"max_tokens": 4, name: value})
    assert nothing_is_held(llm.stats())


@pytest.mark.parametrize(
    "prompt",
    [[10**9], [-1], [1.5], ["a"], [True], None, "\ud800"],
    ids=["big", "neg", "float", "str", "bool", "none", "?"],
)
def test_one_bad_prompt_refuses_the_batch_before_anything_runs(llm: LLM, prompt: Any) -> None:
    steps = llm.stats().step
    with pytest.raises((TypeError, ValueError), match=r"prompts\[1\]"):
        llm.generate(["a", prompt, "b"], max_tokens=2)
    assert nothing_is_held(llm.stats()) and llm.stats().step == steps


def test_one_string_is_no_list(llm: LLM) -> None:
    with pytest.raises(TypeError, match="prompts is one string"):
        llm.generate("abc", max_tokens=2)
    with pytest.raises(TypeError, match="overrides='device=cpu' is one string"):
        LLM("bundled", overrides="device=cpu")


def test_a_failed_batch_gives_everything_back(llm: LLM) -> None:
    alone = llm.generate(["import os"], max_tokens=8, temperature=0.0)[0].tokens
    with pytest.raises(GenerationFailed, match="the prompt is empty"):
        llm.generate(["import os", "", "import json"], max_tokens=200, temperature=0.0, ignore_eos=True)
    assert nothing_is_held(llm.stats())
    assert llm.generate(["import os"], max_tokens=8, temperature=0.0)[0].tokens == alone


@pytest.mark.parametrize("seed", [-1, 2**63 + 5, 2**200])
def test_any_integer_is_a_seed(llm: LLM, seed: int) -> None:
    first, second = (llm.generate(["def f("], max_tokens=8, seed=seed)[0].tokens for _ in range(2))
    assert first == second


def test_a_prompt_is_scored_without_generating(llm: LLM) -> None:
    (done,) = llm.generate(["import os"], max_tokens=0, prompt_logprobs=1)
    assert done.tokens == () and done.finish_reason == "length"
    assert len(done.prompt_logprobs) == len(llm.tokenizer.encode_now("import os"))


def test_a_stop_may_be_one_string(llm: LLM) -> None:
    options = {"max_tokens": 20, "temperature": 0.0}
    whole = llm.generate(["def f():\n"], **options)[0].text
    stop = whole[5:7]
    assert llm.generate(["def f():\n"], stop=stop, **options)[0].text == whole[: whole.index(stop)]


def test_a_stop_counts_once_the_output_is_long_enough(llm: LLM) -> None:
    options = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    whole = llm.generate(["def f():\n"], **options)[0]
    stop = whole.text[1]
    at_once, later = (llm.generate(["def f():\n"], stop=stop, min_tokens=n, **options)[0] for n in (0, 12))
    assert at_once.text == whole.text[: whole.text.index(stop)] and len(at_once.tokens) < 12 <= len(later.tokens)
    assert whole.text.startswith(later.text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("nothing", "x"),  # type: ignore[arg-type]
        Grammar("regex", None),  # type: ignore[arg-type]
        Grammar("regex", "\ud800"),
        Grammar("json_schema", "{"),
        Grammar("json_schema", ""),
        Grammar("json_schema", "[" * 5000),
        Grammar("choice", "[1]"),
        Grammar("choice", "[]"),
        Grammar("choice", '["a", ""]'),
        Grammar("calls", "{}"),
    ],
)
def test_a_grammar_of_wrong_values_is_refused_by_name_and_the_next_call_is_answered(llm: LLM, grammar: Grammar) -> None:
    for tools in (None, TOOLS):
        with pytest.raises(ValueError, match=r"^grammar=Grammar\("):
            llm.chat(HI, tools=tools, grammar=grammar)
    assert llm.chat(HI, max_tokens=4, temperature=0.0).tokens
