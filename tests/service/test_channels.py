"""Messages with headers: thoughts, calls and text, however the output is cut."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from engine.service.channels import LONGEST_HEADER, ChannelParser, header_within
from engine.service.parts import CallText, Part, merged
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import CHANNELS

THOUGHT = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
Said = list[tuple[str, str]]
"""What was thought, said, and called with what, in order."""


def parsed(pieces: Sequence[str], header: str = "", tools: bool = True, is_shown: bool = True, **more: bool) -> Said:
    inner = ToolParser(CHANNELS, {"add": {}, "now": {}}, None, **more) if tools else None
    parser = ChannelParser(header, is_shown, inner)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return [told(part) for part in merged([*parts, *parser.finish()])]


def told(part: Part) -> tuple[str, str]:
    if isinstance(part, CallText):
        assert part.id
        return part.name, part.arguments
    return type(part).__name__, part.text


CASES: list[tuple[str, Said]] = [
    (f"{THOUGHT}Why? <b>\n{NEXT}{FINAL}Yes.<|return|>", [("Reasoning", "Why? <b>\n"), ("Text", "Yes.")]),
    (f'{THOUGHT}Add.{NEXT}{CALL}{{"a": 1}}<|call|>', [("Reasoning", "Add."), ("add", '{"a": 1}')]),
    (
        f"{THOUGHT}a{NEXT}<|channel|>commentary<|message|>Plan:\n1{NEXT}{THOUGHT}b{NEXT} to=functions.now"
        "<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        [("Reasoning", "a"), ("Text", "Plan:\n1"), ("Reasoning", "\nb"), ("now", "{}")],
    ),
    (f"{THOUGHT}a{NEXT}{THOUGHT}b{NEXT}{FINAL}c{NEXT}{FINAL}d", [("Reasoning", "a\nb"), ("Text", "c\nd")]),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', [("add", '{"a": 1}')]),
    (f'{CALL}{{"a": 1}}<|call|><|start|>assistant{CALL}{{}}<|call|>', [("add", '{"a": 1}'), ("add", "{}")]),
    ('<|channel|>analysis to=functions.add<|message|>{"a": "cut', [("add", '{"a": "cut')]),
    ("<|channel|>commentary to=python code<|message|>1 + 1<|call|>", [("Text", "1 + 1")]),
    (f"{CALL}no JSON<|call|>", [("Text", f"{CALL}no JSON")]),
    ("<|message|>Yes.<|end|>", [("Text", "Yes.")]),
    (f"{FINAL}a <|start|> b <|channel|>c<|end|>d", [("Text", "a <|start|> b <|channel|>cd")]),
    ("Yes <|b", [("Text", "Yes <|b")]),
    ("<|channel|>fin", [("Text", "<|channel|>fin")]),
    (
        "<|start|>" + "x" * LONGEST_HEADER + "<|message|>",
        [("Text", "<|start|>" + "x" * LONGEST_HEADER + "<|message|>")],
    ),
    ("to=day", [("Text", "to=day")]),
]


@pytest.mark.parametrize(("text", "said"), CASES, ids=[text[:40] for text, _ in CASES])
def test_every_cut_of_an_output_gives_the_same_parts(text: str, said: Said) -> None:
    assert parsed([text]) == said
    assert parsed(list(text)) == said
    for at in range(len(text) + 1):
        assert parsed([text[:at], text[at:]]) == said, at


HEADER = re.compile(
    r"(?:(?:<\|start\|>|(?:^|(?<=<\|end\|>)|(?<=<\|call\|>)|(?<=<\|return\|>))\s*to=)[^<>\n]*(?:<\|channel\|>[^<>\n]*)?"
    r"|<\|channel\|>[^<>\n]*)(?:<\|constrain\|>[^<>\n]*)?(?=<\|message\|>)"
)


def letters(text: str) -> str:
    """Without white space and the tokens of messages, those included that come of leaving out others."""
    left = re.sub(r"<\|(?:message|end|call|return)\|>|\s", "", text)
    return left if left == text else letters(left)


def test_mutated_outputs_lose_no_text_and_cuts_change_nothing() -> None:
    """What is no header is content."""
    draw, texts = random.Random(5), [text for text, _ in CASES if len(text) < LONGEST_HEADER]
    for _ in range(1500):
        characters = list(draw.choice(texts))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(characters) + 1)
            characters[at : at + draw.randrange(3)] = draw.choice(
                ["<", "|", ">", "x", "", "\n", "<|end|>", "<|channel|>", "<|message|>", "<|start|>"]
            )
        text = "".join(characters)
        whole = parsed([text], tools=False)
        at = draw.randrange(len(text) + 1)
        assert parsed([text[:at], text[at:]], tools=False) == whole, text
        assert letters("".join(said for _, said in whole)) == letters(HEADER.sub("", text)), text
        assert parsed(list(text)) == parsed([text]), text


def test_a_prompt_may_end_within_a_header_or_a_message() -> None:
    assert header_within("<|end|><|start|>assistant") == "" == header_within("Hello")
    for header, said in (
        (FINAL, [("Text", "Yes")]),
        (THOUGHT, [("Reasoning", "Yes")]),
        ("<|channel|>", [("Text", "Yes")]),
        (" to=functions", [("Text", "Yes")]),
    ):
        assert header_within(f"<|start|>user<|message|>Hi<|end|><|start|>assistant{header}") == header
        assert parsed(list("Yes"), header) == said
    assert parsed(["final<|message|>Yes"], "<|channel|>") == [("Text", "Yes")]


def test_an_output_thinks_from_the_header_of_a_thought_to_its_end() -> None:
    parser, thinks = ChannelParser("", True, None), []
    for piece in ("<|channel|>", "analysis", "<|message|>", "Why", "<|end|>", "<|start|>", "assistant", FINAL, "Yes"):
        parser.feed(piece)
        thinks.append(parser.is_reasoning)
    assert thinks == [False, False, True, True, False, False, False, False, False]


def test_thoughts_can_be_left_out_and_text_where_there_must_be_calls() -> None:
    text, said = CASES[2]
    assert parsed([text], is_shown=False) == said[1:2] + said[3:]
    assert parsed([text], calls_only=True) == [("Reasoning", "a\nb"), ("now", "{}")]


def test_calls_are_text_where_there_are_no_tools() -> None:
    assert parsed([f"{CALL}{{}}<|call|>"], tools=False) == [("Text", "{}")]
