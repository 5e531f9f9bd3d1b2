"""What translations of other APIs to chats share."""

from __future__ import annotations

import pytest

from engine.service.errors import ApiError
from engine.service.protocol import CacheControl, ContentPart, Message
from engine.service.translating import Joined, function_tool, required, system_first


def test_what_the_system_says_first_is_one_message() -> None:
    user, later = Message("user", "u"), Message("system", "z")
    words = CacheControl("ephemeral")
    parts = [ContentPart("text", "b"), ContentPart("text", "c", words)]
    found = system_first([Message("system", "a", cache_control=words), Message("developer", parts), user, later])
    assert found == [Joined("system", "a\n\nb\n\nc", marks=[(1, words), (7, words)]), user, later]
    assert system_first([later, user]) == [later, user] and system_first([user]) == [user] and system_first([]) == []


def test_what_is_no_text_is_left_to_be_refused() -> None:
    image = ContentPart("image")
    (found,) = system_first([Message("system", "a"), Message("system", [image])])
    assert found.content == [ContentPart("text", "a"), image]


def test_errors_name_the_field() -> None:
    assert required("x", "a.b") == "x"
    for call in (lambda: required("", "a.b"), lambda: required(None, "a.b"), lambda: function_tool("a.b", name="x y")):
        with pytest.raises(ApiError) as error:
            call()
        assert error.value.param == "a.b" and "'a.b'" in error.value.message
