"""What a gateway reads of a body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.router import UNIT_BYTES
from engine.service.errors import ApiError
from engine.service.peek import MOST_CHOICES, MOST_FIELDS, MOST_PROMPT_BYTES, SMALL_BYTES, Peek, peek, units

FIELDS = ("tools", "messages")


def of(body: dict[str, Any], **given: Any) -> Peek:
    return peek(json.dumps(body).encode(), FIELDS, **given)


def test_what_places_a_request_is_read_and_the_rest_is_kept_as_it_is() -> None:
    found = of({"model": "m", "messages": [1], "n": 3, "stream": True, "user": "u", "cache_salt": "s", "top_p": 0.5})
    assert (found.model, found.n, found.stream, found.user, found.cache_salt) == ("m", 3, True, "u", "s")
    assert found.fields["top_p"] == 0.5 and "messages" not in found.fields
    assert not found.goes_on


@pytest.mark.parametrize("streams", [True, False])
def test_a_body_that_says_nothing_is_of_the_default(streams: bool) -> None:
    for body in ({}, dict.fromkeys(("model", "n", "stream", "user", "cache_salt", "previous_response_id"))):
        found = of(body, streams=streams)
        assert (found.model, found.n, found.stream, found.user, found.cache_salt) == (None, 1, streams, None, "")
        assert not found.goes_on and found.prompt


def test_values_of_a_wrong_type_are_left_for_the_server_to_refuse() -> None:
    found = of({"user": [], "cache_salt": {}})
    assert (found.user, found.cache_salt) == (None, "")


@pytest.mark.parametrize(
    "wrong", [{"stream": 1}, {"stream": "true"}, {"n": "2"}, {"n": 2.0}, {"model": 7}, {"model": ["m"]}]
)
def test_what_some_servers_would_take_for_another_way_to_answer_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        of(wrong)
    assert (refused.value.kind, refused.value.param) == ("invalid", next(iter(wrong)))


def test_a_long_name_of_a_model_is_not_taken_for_none() -> None:
    with pytest.raises(ApiError, match=f"model is longer than {SMALL_BYTES} bytes"):
        of({"model": "m" * SMALL_BYTES})


def test_a_body_of_many_fields_is_refused() -> None:
    with pytest.raises(ApiError, match="fields"):
        of({f"f{i}": 0 for i in range(MOST_FIELDS + 1)})


def test_a_long_prompt_is_placed_like_its_beginning() -> None:
    data = b"abcd" * (MOST_PROMPT_BYTES // 4)
    assert units(data + b"efgh") == units(data)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ('"a, b"', 1), ('""', 1), ("[1, 2, 3]", 1), ('["a, b"]', 1),
        ("[]", 1), ("null", 1), ("7", 1), ("[[1, 2, 3]]", 1),
        ('["a", "b"]', 2), (' [ "a"\n,\t"b" ] ', 2), ('["a\\",\\"b", "[", "],["]', 3),
        ('["", "", ""]', 3), ("[[1], [2, 3]]", 2),
        ('["a", [1], "\\\\"]', 3), ("[" + ",".join(['"a"'] * 500) + "]", MOST_CHOICES),
    ],
)  # fmt: skip
def test_each_prompt_is_a_sequence(prompt: str, count: int) -> None:
    for n in (1, 2):
        body = f'{{"n": {n}, "prompt" :{prompt}}}'.encode()
        assert peek(body, ("prompt",)).n == min(n * count, MOST_CHOICES)
    assert peek(f'{{"prompt": {prompt}, "n": -5}}'.encode(), ("prompt",)).n == count


@given(st.lists(st.text() | st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=9))
def test_any_list_of_prompts_is_counted(prompts: list[Any]) -> None:
    for ascii_only in (True, False):
        data = json.dumps({"prompt": prompts}, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        assert peek(data, ("prompt",)).n == len(prompts)


@pytest.mark.parametrize(("sent", "n"), [(0, 1), (-5, 1), (2, 2), (10**30, MOST_CHOICES), (True, 1)])
def test_the_number_of_answers_is_bounded(sent: int, n: int) -> None:
    assert of({"n": sent}).n == n


def test_a_response_that_goes_on_is_known() -> None:
    assert of({"previous_response_id": "resp_1"}).goes_on


def test_large_fields_are_not_shown_to_routers() -> None:
    found = of({"metadata": "x" * SMALL_BYTES, "small": "x"})
    assert "metadata" not in found.fields and found.fields["small"] == "x"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"7", b'{"a": }', b"{", b'{"a": 1} x', b"\xff\xfe", b'{"\xff": 1}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        peek(body, FIELDS)
    assert (refused.value.kind, refused.value.code) == ("invalid", "invalid_json")


@pytest.mark.parametrize("name", ["messages", "other"])
def test_what_is_nested_too_deeply_is_refused_and_ends_nothing(name: str) -> None:
    body = b'{"%b": %b%b}' % (name.encode(), b"[" * 100_000, b"]" * 100_000)
    with pytest.raises(ApiError) as refused:
        peek(body, FIELDS)
    assert refused.value.kind == "invalid"


@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.text(max_size=20))
def test_a_conversation_that_goes_on_begins_with_the_numbers_of_the_one_before(turns: list[str], more: str) -> None:
    def numbers(contents: list[str]) -> tuple[int, ...]:
        return of({"messages": [{"role": "user", "content": one} for one in contents], "tools": [{"name": "t"}]}).prompt

    before = numbers(turns)
    # The last number may have been the end of the last message, where another one follows now.
    assert numbers([*turns, more])[: len(before) - 1] == before[:-1]


def test_the_order_of_fields_in_a_body_does_not_matter() -> None:
    first, second = {"messages": [{"content": "hello"}]}, {"tools": [{"name": "t"}], "model": "m"}
    assert of(first | second).prompt == of(second | first).prompt


@given(st.binary(max_size=64))
def test_a_prompt_has_a_number_for_each_four_bytes_and_at_least_one(data: bytes) -> None:
    found = units(data)
    assert len(found) == max(1, len(data) // UNIT_BYTES)
    assert len(data) < UNIT_BYTES or found[0] == int.from_bytes(data[:4], "little")
