"""What a conversation asks, and what its commands change."""

import pytest

from engine_lab.chat.commands import obey
from engine_lab.chat.conversation import Conversation


def said(line: str, conversation: Conversation) -> str:
    told: list[str] = []
    assert obey(line, conversation, lambda: told.append("asked why"), told.append)
    return "\n".join(told)


def test_a_question_is_asked_after_what_was_said():
    conversation = Conversation("Be brief.", {"temperature": 0})
    conversation.keep("a", "b")
    body = conversation.body("tiny", "c")
    assert [(turn["role"], turn["content"]) for turn in body["messages"]] == [
        ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"),
    ]  # fmt: skip
    assert (body["model"], body["temperature"], body["stream"]) == ("tiny", 0, True)
    assert len(conversation.turns) == 2, "a question is kept once it is answered"


def test_parameters_are_json_or_texts_and_an_empty_one_goes():
    conversation = Conversation()
    assert said("/params temperature=0.7 stop='[\"a b\"]' cache_salt=mine", conversation)
    assert conversation.params == {"temperature": 0.7, "stop": ["a b"], "cache_salt": "mine"}
    assert said("/params temperature= seed=3", conversation) == 'stop=["a b"] cache_salt="mine" seed=3'
    assert said("/params", Conversation()) == "the server's defaults"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/params temperature", "'temperature': expected NAME=VALUE"),
        ("/params seed=1 messages=[]", "messages is set by engine chat"),
        ("/params stop='a", "No closing quotation; expected NAME=VALUE"),
        ("/reste", "no command '/reste'; expected /reset"),
    ],
)
def test_a_command_that_makes_no_sense_changes_nothing(line, says):
    conversation = Conversation("Be brief.", {"seed": 7}, [{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match=says):
        said(line, conversation)
    assert conversation == Conversation("Be brief.", {"seed": 7}, [{"role": "user", "content": "a"}])


def test_reset_forgets_turns_and_keeps_the_rest():
    conversation = Conversation("Be brief.", {"seed": 7}, [{"role": "user", "content": "a"}])
    said("/reset", conversation)
    assert conversation == Conversation("Be brief.", {"seed": 7})


def test_the_system_prompt_is_shown_set_and_taken_away():
    conversation = Conversation()
    assert said("/system", conversation) == "no system prompt"
    assert said("/system Be  kind.", conversation) == "Be  kind."
    assert said("/system -", conversation) == "no system prompt" and conversation.system == ""


def test_help_why_and_exit():
    conversation = Conversation()
    assert "/params" in said("/help", conversation) and said("/why", conversation) == "asked why"
    assert not obey("/exit", conversation, lambda: None, print)
