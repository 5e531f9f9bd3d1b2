"""Objects whose text was cut."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest

from engine.service.partial_json import members

VALUE: dict[str, Any] = {
    "a": 12, "b": 'x"\\ü{', "c": [1, -2.5e3, "y", {"d": None}, []], "e": {"f": True, "g": {}}, "": False,
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_cut_object_is_what_clients_make_of_the_pieces_that_came(indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(VALUE, indent=indent, ensure_ascii=ascii_only)
    for end in range(1, len(text) + 1):
        expected = jiter.from_json(text[:end].encode(), partial_mode=True)
        assert members(text[:end]) == expected, text[:end]
    assert members(text) == VALUE


@pytest.mark.parametrize("text", ["", " ", "[1", "12", "}", "{]", "{a: 1", '{"a" 1, "b": 2}', "null", ",", ":"])
def test_what_is_no_object_has_no_members(text: str) -> None:
    assert members(text) == {}


def test_a_deep_object_is_cut_in_a_moment() -> None:
    assert members('{"a":' * 100_000) == {}
