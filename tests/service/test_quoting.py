from __future__ import annotations

import re
from typing import Any

import msgspec
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st

from engine.service.quoting import Rendered, quoted, specials_pattern
from engine.service.turns import Conversation, FunctionCall, TextPart, ToolCall, Turn

NAMES = st.sets(st.text("<|ab[.", min_size=1, max_size=5), min_size=1, max_size=12)


@cases(NAMES, st.text("<|ab[.x", max_size=40))
@settings(max_examples=120)
def test_the_longest_special_token_is_found_wherever_one_begins(names: set[str], text: str) -> None:
    in_turn = re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")
    assert specials_pattern(names).split(text) == in_turn.split(text)


@cases(NAMES, st.lists(st.text("<|ab[.x", max_size=4), max_size=6))
@settings(max_examples=120)
def test_quoted_texts_have_no_special_token_put_together_either(names: set[str], texts: list[str]) -> None:
    marks = {"<" + name + ">" for name in names}
    asked = Conversation(tuple([Turn("user", text) for text in texts])).plain()
    given, placeholders = quoted(asked, specials_pattern(marks, begun=True))
    together = "".join(message["content"] for message in given.messages)
    assert not specials_pattern(marks).search(together)
    assert Rendered("", placeholders).unquote(together) == "".join(texts)


def test_names_of_fields_begin_no_special_token() -> None:
    specials = specials_pattern(["name>", " x>", "<n>"], begun=True)
    assert [specials.sub("!", text) for text in ("name", " ", "name>", "a <n", "<n>")] == ["name", " ", "!", "a !", "!"]


@cases(NAMES, st.text("<|ab[.x\ue000\ue001", max_size=40), st.text("<|ab[.x", max_size=40))
@settings(max_examples=120)
def test_what_is_quoted_has_no_special_token_and_is_unquoted_again(names: set[str], first: str, second: str) -> None:
    # A placeholder has hexadecimal digits, which can be a special token of these.
    specials = specials_pattern({name + ">" for name in names})
    parts, any_json = [TextPart(first), TextPart(second)], {first: [second, {"a": first}, None, 3, True]}
    call = ToolCall(first, FunctionCall(second, any_json))
    turns = (
        Turn("user", parts),
        Turn("assistant", second + ">", first, tool_calls=[call]),
        Turn("tool", second, tool_call_id=first),
    )
    asked = Conversation(turns, True, any_json, tools=(any_json,), documents=(any_json,)).plain()
    given, names = quoted(asked, specials)
    told = [[value for key, value in message.items() if key != "role"] for message in given.messages]
    assert not any(specials.search(text) for text in texts_of([told, given.variables, given.tools, given.documents]))
    assert [message["role"] for message in given.messages] == ["user", "assistant", "tool"]
    assert unquoted(msgspec.to_builtins(given), Rendered("", names)) == msgspec.to_builtins(asked)


def texts_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return texts_of([*value, *value.values()])
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else [str(value)]


def unquoted(value: Any, rendered: Rendered) -> Any:
    if isinstance(value, dict):
        return {unquoted(key, rendered): unquoted(item, rendered) for key, item in value.items()}
    if isinstance(value, list):
        return [unquoted(item, rendered) for item in value]
    return rendered.unquote(value) if isinstance(value, str) else value


def test_a_special_token_has_one_placeholder_in_a_conversation() -> None:
    asked = Conversation((Turn("user", "<s>a<s>"),) * 2).plain()
    given, names = quoted(asked, specials_pattern(["<s>"]))
    assert list(names.values()) == ["<s>"] and len({message["content"] for message in given.messages}) == 1


def test_thousands_of_special_tokens_make_a_pattern_that_tries_one_character_at_a_time() -> None:
    pattern = specials_pattern([f"<unused{i}>" for i in range(6000)]).pattern
    assert pattern.count("<unused") == 1
    assert specials_pattern(["<unused1>", "<unused10>"]).split("<unused10><unused1><unused100>") == [
        *("", "<unused10>", "", "<unused1>", "<unused100>")
    ]
