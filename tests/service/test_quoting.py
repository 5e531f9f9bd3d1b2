from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.service.quoting import Rendered, quoted_messages, specials_pattern

NAMES = st.sets(st.text("<|ab[.", min_size=1, max_size=5), min_size=1, max_size=12)


@given(NAMES, st.text("<|ab[.x", max_size=40))
@settings(max_examples=300, deadline=None)
def test_the_longest_special_token_is_found_wherever_one_begins(names: set[str], text: str) -> None:
    in_turn = re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")
    assert specials_pattern(names).split(text) == in_turn.split(text)


@given(NAMES, st.text("<|ab[.x\ue000\ue001", max_size=40), st.text("<|ab[.x", max_size=40))
@settings(max_examples=300, deadline=None)
def test_what_is_quoted_has_no_special_token_and_is_unquoted_again(names: set[str], first: str, second: str) -> None:
    # A placeholder has hexadecimal digits, which can be a special token of these.
    specials = specials_pattern({name + ">" for name in names})
    parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
    messages = [{"role": "user", "content": parts}, {"role": "<a>", "content": second + ">", "name": first}]
    variables = {first: [second, {"a": first}, None, 3, True]}
    turns, given, quoted = quoted_messages(messages, variables, specials)
    told = [[value for key, value in turn.items() if key != "role"] for turn in turns]
    assert not any(specials.search(text) for text in texts_of([told, given]))
    assert [roles["role"] for roles in turns] == ["user", "<a>"]
    restored = [{k: unquoted(v, Rendered("", quoted)) for k, v in turn.items()} for turn in turns]
    assert restored == messages and unquoted(given, Rendered("", quoted)) == variables


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
    turns, _, quoted = quoted_messages([{"role": "user", "content": "<s>a<s>"}] * 2, {}, specials_pattern(["<s>"]))
    assert list(quoted.values()) == ["<s>"] and len({turn["content"] for turn in turns}) == 1


def test_thousands_of_special_tokens_make_a_pattern_that_tries_one_character_at_a_time() -> None:
    pattern = specials_pattern([f"<unused{i}>" for i in range(6000)]).pattern
    assert pattern.count("<unused") == 1
    assert specials_pattern(["<unused1>", "<unused10>"]).split("<unused10><unused1><unused100>") == [
        *("", "<unused10>", "", "<unused1>", "<unused100>")
    ]
