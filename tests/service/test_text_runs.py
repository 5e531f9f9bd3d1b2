"""Which tokens of an output are of its texts."""

from __future__ import annotations

import random

import pytest

from engine.contracts.request import TokenLogprobs, TokensOut
from engine.service.output import Delta, Output, joined
from engine.service.output_text import OutputText
from engine.service.parts import CallText, PartParser, Text
from engine.service.reasoning import ReasoningParser, ReasoningSyntax, ReasoningUse
from engine.service.text_runs import TextRuns
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import SYNTAXES

from .fakes import END, ids, make_tokenizer, text_of

TAGGED = next(syntax for syntax in SYNTAXES if syntax.name == "tagged")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "ok < b"}}\n</tool_call>'


def run(text: str, parser: PartParser | None, sizes: list[int]) -> list[Delta]:
    """The deltas of an output whose steps bring so many tokens, over and over."""
    output = Output(OutputText(make_tokenizer(), (1,)), lambda: None, wants_logprobs=True, parser=parser)
    left, found = [*ids(text), END], []
    while left:
        size = sizes[len(found) % len(sizes)] if found else sizes[0]
        step, left = tuple(left[:size]), left[size:]
        logprobs = tuple([TokenLogprobs(token, -0.5) for token in step])
        reason = None if left else "stop"
        delta = output.take(TokensOut("x", step, logprobs, finish_reason=reason, stop_token=None if left else END))
        found.append(delta or Delta(0))
    return found


def texts(deltas: list[Delta]) -> list[tuple[int | None, str]]:
    """The text of the tokens of each run, in order."""
    found: dict[int | None, list[int]] = {}
    for delta in deltas:
        for token in delta.tokens:
            found.setdefault(token.run, []).append(token.token)
    return [(number, text_of(tokens)) for number, tokens in found.items() if number is not None]


CASES = [
    "Hello",
    f"Wait. {CALL}",
    f"Wait. {CALL}\nok{CALL} and so on < x <tool",
    f"{CALL}ok",
    "a <tool_call> b < c <<tool_call ü",
    f"ü{CALL}ü",
]


@pytest.mark.parametrize("text", CASES)
def test_the_tokens_of_a_run_spell_its_text(text: str) -> None:
    draw = random.Random(5)
    for sizes in ([1], [2], [1000], *([draw.randrange(1, 9) for _ in range(5)] for _ in range(20))):
        deltas = run(text, ToolParser(TAGGED, {}), sizes)
        whole = joined(deltas)
        expected = [part.text for part in whole.parts if isinstance(part, Text)]
        assert [words for _, words in texts(deltas)] == expected, sizes
        assert [number for number, _ in texts(deltas)] == [*range(len(expected))]
        assert len(whole.tokens) == len(ids(text)), "every token is shown once"


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_thought_is_no_text(is_shown: bool) -> None:
    inner = ToolParser(TAGGED, {})
    use = ReasoningUse(ReasoningSyntax("<think>", "</think>"), "before", is_shown, shows_special=False)
    parser = ReasoningParser(use, inner)
    deltas = run(f"<think>\nok ok\n</think>\n\nok. {CALL}\nok", parser, [1])
    assert texts(deltas) == [(0, "ok. "), (1, "ok")]


def test_without_parts_all_tokens_are_of_the_text() -> None:
    assert texts(run("Hello", None, [2])) == [(0, "Hello")]


def test_a_token_within_which_a_text_ends_is_of_the_text() -> None:
    runs = TextRuns()
    runs.add("ok<", (Text("ok"),), is_reasoning=False)
    assert (runs.run_of(0, 3), runs.is_certain(0, 3)) == (0, True)
    runs.add("call>", (CallText(0, "", "id", "f"),), is_reasoning=False)
    assert (runs.run_of(3, 8), runs.is_certain(3, 8)) == (None, True)


def test_a_token_is_certain_once_its_text_is_part_of_something() -> None:
    runs = TextRuns()
    runs.add("a", (Text("a"),), is_reasoning=False)
    runs.add("<", (), is_reasoning=False)
    assert runs.is_certain(0, 1) and not runs.is_certain(1, 2)
    runs.add("b", (Text("<b"),), is_reasoning=False)
    assert [runs.run_of(at, at + 1) for at in range(3)] == [0, 0, 0]
    assert runs.run_of(1, 1) == 0, "a token without a character is of the text around it"
