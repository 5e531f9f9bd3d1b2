"""The question that a conversation ends with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.service.turns import Conversation, TextPart, Turn, question_of

TOOL = {"type": "function", "function": {"name": "f"}}
SYSTEM, ASKED = Turn("system", "Be brief."), Turn("user", "Why?")


def test_a_question_is_what_the_user_says_last_and_the_rest_is_everything_else() -> None:
    for said in (ASKED, Turn("user", [TextPart("Wh"), TextPart("y?")])):
        question = question_of(Conversation((SYSTEM, said)))
        assert question is not None and question.text == "Why?"
        assert question.rest == Conversation((SYSTEM, Turn("user", "")))


@pytest.mark.parametrize(
    "other",
    [
        Conversation((ASKED,)),
        Conversation((Turn("system", "Be long."), ASKED)),
        Conversation((SYSTEM, Turn("user", "Why?", name="eve"))),
        Conversation((SYSTEM, ASKED), add_generation_prompt=False),
        Conversation((SYSTEM, ASKED), variables={"enable_thinking": False}),
    ],
)
def test_whatever_else_a_model_reads_is_in_the_rest(other: Conversation) -> None:
    def encoded(conversation: Conversation) -> bytes:
        question: Any = question_of(conversation)
        return msgspec.msgpack.encode(question.rest)

    assert encoded(other) != encoded(Conversation((SYSTEM, ASKED)))


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(()),
        Conversation((ASKED, Turn("assistant", "Because"))),
        Conversation((ASKED, Turn("tool", "4", tool_call_id="c"))),
        Conversation((ASKED,), tools=(TOOL,)),
    ],
)
def test_there_is_none_where_the_user_does_not_speak_last_or_functions_may_be_called(
    conversation: Conversation,
) -> None:
    assert question_of(conversation) is None
