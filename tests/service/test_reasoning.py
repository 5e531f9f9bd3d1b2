"""Thoughts in the text of an output: found however it is cut, and nothing is lost."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.constraint import Grammar
from engine.contracts.request import ReasoningTokens
from engine.service.errors import ApiError
from engine.service.parts import CallText, Part, PartParser, Reasoning, Text, merged
from engine.service.protocol import ChatOptions, CompletionOptions
from engine.service.reasoning import (
    SYNTAXES,
    Place,
    ReasoningUse,
    reasoning_syntax_of,
    reasoning_tokens,
    reasoning_use,
)
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import SYNTAXES as CALLS

THINK = SYNTAXES[0]
TAGGED = next(syntax for syntax in CALLS if syntax.name == "tagged")
QWEN = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{{ content.split('</think>')[-1] }}"


def use(place: Place = "before", is_shown: bool = True) -> ReasoningUse:
    return ReasoningUse(THINK, place, is_shown, False)


def parts(pieces: list[str], place: Place, inner: PartParser | None = None, is_shown: bool = True) -> tuple[Part, ...]:
    parser = use(place, is_shown).parser(inner)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*found, *parser.finish()])


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("<think>\nwhy\n\n so\n</think>\n\nYes.\n", "before", (Reasoning("why\n\n so"), Text("Yes.\n"))),
        ("\n<think>a</think>b", "before", (Reasoning("a"), Text("b"))),
        ("why</think>Yes", "within", (Reasoning("why"), Text("Yes"))),
        ("why < so </thin", "within", (Reasoning("why < so </thin"),)),
        ("<think>cut ", "before", (Reasoning("cut "),)),
        ("<think>\n</think>\nYes", "before", (Text("Yes"),)),
        (" \n <b> Yes <think>no</think>", "before", (Text(" \n <b> Yes <think>no</think>"),)),
        ("  <th", "before", (Text("  <th"),)),
        (" Yes</think>", "after", (Text(" Yes</think>"),)),
        ("a</think>b<think>c</think>", "within", (Reasoning("a"), Text("b<think>c</think>"))),
        ("", "within", ()),
    ],
)
def test_every_cut_of_an_output_gives_the_same_parts(text: str, place: Place, expected: tuple[Part, ...]) -> None:
    assert parts([text], place) == parts(list(text), place) == expected
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parts([text[:first], text[first:second], text[second:]], place) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "\n", " ", "a", "think>"]), max_size=9),
    st.sampled_from(["before", "within", "after"]),
    st.data(),
)
@settings(max_examples=120)
def test_nothing_is_lost_but_the_texts_around_a_thought(pieces: list[str], place: Place, data: Any) -> None:
    text = "".join(pieces)
    found = parts(pieces, place)
    at = data.draw(st.integers(0, len(text)))
    assert parts([text[:at], text[at:]], place) == found
    shown = "".join(part.text for part in found if not isinstance(part, CallText))
    kept = "".join(shown.split())
    allowed = {"".join(text.split())}
    for marker in (THINK.opens, THINK.closes):  # each is left out once at most
        allowed |= {each.replace(marker, "", 1) for each in allowed}
    assert kept in allowed


def test_calls_are_found_in_the_answer_and_not_in_the_thought() -> None:
    said = '<tool_call>{"name": "a"}</tool_call>'
    text = f'<think>I may {said}</think>\n<tool_call>{{"name": "b", "arguments": {{}}}}</tool_call>'
    for pieces in ([text], list(text)):
        thought, call = parts(pieces, "before", ToolParser(TAGGED, {"a": {}, "b": {}}))
        assert thought == Reasoning(f"I may {said}")
        assert isinstance(call, CallText) and (call.name, call.arguments) == ("b", "{}")


def test_a_thought_may_be_a_channel_with_a_name() -> None:
    """Its first token is one of the model, its name is text."""
    syntax = reasoning_syntax_of("{{ '<|channel>thought\\n<channel|>' }}")
    assert syntax is not None
    text = "<|channel>thought\nwhy\n<channel|>Yes <|channel>"
    for at in range(len(text)):
        parser = ReasoningUse(syntax, "before", True, True).parser(None)
        found = [*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.finish()]
        assert merged(found) == (Reasoning("why"), Text("Yes <|channel>"))
    model: Any = SimpleNamespace(id_of={"<|channel>": 7, "<channel|>": 8}.get)
    found = reasoning_tokens(
        ChatOptions(), ReasoningUse(syntax, "before", True, True), model, Grammar("json_object"), 9
    )
    assert found == ReasoningTokens(8, 7)


def test_thoughts_can_be_left_out() -> None:
    assert parts(["why</think>Yes"], "within", is_shown=False) == (Text("Yes"),)


def tokenizer(template: str = QWEN, **ids: int) -> Any:
    source = SimpleNamespace(source=SimpleNamespace(text=template))
    names = {f"<{name}>".replace("<_", "</"): id_ for name, id_ in ids.items()}
    return SimpleNamespace(template=source, special_ids={}, id_of=names.get)


@pytest.mark.parametrize(
    ("tail", "place"),
    [
        ("<|im_start|>assistant\n", "before"),
        ("<|im_start|>assistant\n<think>\n", "within"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "after"),
        ("say <think><|im_end|>\n<|im_start|>assistant\n", "before"),
    ],
)
def test_the_end_of_a_prompt_says_where_its_output_stands(tail: str, place: str) -> None:
    found = reasoning_use(ChatOptions(), tokenizer(), lambda: tail)
    assert found is not None and (found.syntax, found.place, found.is_shown) == (THINK, place, True)
    assert reasoning_use(CompletionOptions(), tokenizer(), lambda: tail) is None
    assert reasoning_use(ChatOptions(), tokenizer("{{ messages }}"), lambda: tail) is None


def test_thoughts_that_are_messages_are_found_by_their_headers_and_have_no_budget() -> None:
    model = tokenizer("<|start|>assistant<|channel|>analysis<|message|>")
    found = reasoning_use(ChatOptions(), model, lambda: "<|end|><|start|>assistant<|channel|>")
    assert found is not None and found.syntax.channels and found.header == "<|channel|>"
    assert reasoning_tokens(ChatOptions(), found, model, Grammar("json_object"), 100) is None, "it is in the grammar"
    parser = found.parser(None)
    parts = [*parser.feed("analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Yes")]
    assert merged([*parts, *parser.finish()]) == (Reasoning("why"), Text("Yes"))
    with pytest.raises(ApiError, match="no syntax of thoughts that this server can limit"):
        reasoning_use(ChatOptions(thinking_token_budget=9), model, lambda: "")
    assert reasoning_use(ChatOptions(), tokenizer("<|end|>"), lambda: "") is None, "many templates have such a token"


def test_a_grammar_and_a_budget_need_the_tokens_around_a_thought() -> None:
    asked, grammar = ChatOptions(thinking_token_budget=9), Grammar("json_object")
    model = tokenizer(think=7, _think=8)
    assert reasoning_tokens(ChatOptions(), use(), model, None, 100) is None
    assert reasoning_tokens(asked, use("after"), model, grammar, 100) is None
    assert reasoning_tokens(ChatOptions(), use(), model, grammar, 100) == ReasoningTokens(8, 7)
    assert reasoning_tokens(asked, use("within"), model, None, 100) == ReasoningTokens(8, None, 9)
    assert reasoning_tokens(ChatOptions(), use(), tokenizer(), grammar, 100) is None, "it cannot begin to think"
    refused: list[tuple[ChatOptions, Place, Any]] = [
        (ChatOptions(), "within", tokenizer()), (asked, "before", tokenizer()), (asked, "within", tokenizer(_think=100))
    ]  # fmt: skip
    for options, place, without in refused:
        with pytest.raises(ApiError, match="no token of this model"):
            reasoning_tokens(options, use(place), without, grammar, 100)
    with pytest.raises(ApiError, match="no syntax of thoughts"):
        reasoning_use(asked, tokenizer("{{ messages }}"), lambda: "")
