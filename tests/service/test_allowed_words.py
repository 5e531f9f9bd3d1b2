"""A field that is one of some words, with another: the error names those."""

import pytest

from engine.service.allowed_words import allowed_words
from engine.service.errors import ApiError
from engine.service.protocol import ChatRequest, decode


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("prompt_cache_retention", ("24h", "in-memory", "in_memory")),
        ("prompt_cache_options.ttl", ("12h", "30m")),
        ("messages[...].cache_control.ttl", ("1h", "5m")),
        ("max_tokens", ()),
        ("nothing.there[...]", ()),
    ],
)
def test_words_are_found_by_the_path_of_a_field(path: str, words: tuple[str, ...]) -> None:
    assert allowed_words(ChatRequest, path) == words


def test_an_error_names_what_was_expected() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt_cache_retention": "48h"}'
    with pytest.raises(ApiError, match=r"enum value '48h', expected one of 24h, in-memory, in_memory, got \"48h\""):
        decode(body, ChatRequest)
