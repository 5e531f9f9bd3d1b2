from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from engine_lab.bench.record import Drafting, Served
from engine_lab.bench.stream import StreamResult, read_stream


def chat(**fields: object) -> str:
    return "data: " + json.dumps(fields) + "\n\n"


def text(content: str | None, finish: str | None = None) -> str:
    return chat(choices=[{"delta": {"content": content}, "finish_reason": finish}])


DONE = "data: [DONE]\n\n"
TIMINGS = {"drafted_tokens": 6, "accepted_tokens": 3, "draft_chains": 2, "draft_ms": 1.0, "decode_ms": 20.0}


def read(*script: tuple[float, str | bytes]) -> StreamResult:
    """Read pieces that arrive at the given times."""
    now = 0.0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal now
        for at, piece in script:
            now = at
            yield piece if isinstance(piece, bytes) else piece.encode()

    return asyncio.run(read_stream(pieces(), lambda: now))


def test_only_chunks_with_text_count_and_the_finish_chunk_ends_the_output():
    role = chat(choices=[{"delta": {"role": "assistant", "content": ""}}])
    usage = chat(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
    result = read((1, role), (2, text("a")), (3, text("b")), (4, text(None, "stop")), (5, usage), (6, DONE))
    assert result.chunks_s == [2, 3]
    assert (result.end_s, result.finish_reason, result.error) == (4, "stop", "")
    assert (result.prompt_tokens, result.output_tokens) == (7, 3)


def test_tokens_are_counted_by_usage_not_by_chunks():
    usage = chat(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 9})
    assert read((1, text("many tokens at once", "length")), (1, usage)).output_tokens == 9


def test_usage_null_in_every_chunk_leaves_counts_unknown():
    result = read((1, chat(choices=[{"text": "x", "finish_reason": "stop"}], usage=None)), (2, DONE))
    assert result.output_tokens is None
    assert result.error == ""


def test_cached_tokens_are_read_from_the_details():
    usage = chat(choices=[], usage={"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}})
    assert read((1, text("x", "stop")), (2, usage)).cached_tokens == 4


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_events_may_be_cut_anywhere(cut):
    whole = (text("né", "stop") + DONE).encode()
    result = read((1, whole[:cut]), (2, whole[cut:]))
    assert result.text == ["né"]
    assert result.done


def test_comments_and_carriage_returns_are_no_trouble():
    result = read((1, ": keep-alive\r\n\r\n"), (2, text("x", "stop").replace("\n", "\r\n")))
    assert result.chunks_s == [2]


def test_reasoning_is_output_too():
    result = read((1, chat(choices=[{"delta": {"reasoning_content": "hm"}}])), (2, text("x", "stop")))
    assert result.chunks_s == [1, 2]


def test_a_stream_that_just_ends_is_a_failure():
    assert read((1, text("half"))).error == "stream_truncated"


def test_an_error_event_is_a_failure_with_its_words():
    result = read((1, text("half")), (2, chat(error={"message": "engine died"})), (3, DONE))
    assert result.error == "stream_error"
    assert "engine died" in result.detail


def test_garbage_is_a_failure_that_quotes_it():
    result = read((1, "data: {oops\n\n"), (2, DONE))
    assert result.error == "bad_json"
    assert "{oops" in result.detail


def test_what_the_server_says_of_drafts_is_read_from_its_timings():
    found = read((1, text("a")), (2, chat(choices=[], timings=TIMINGS)), (3, text(None, "stop")), (4, DONE))
    assert found.drafting == Drafting(6, 3, 2, 1.0, 20.0)


@pytest.mark.parametrize(
    "timings",
    [
        {"predicted_ms": 3.5},
        [1],
        {**TIMINGS, "draft_chains": None},
        {**TIMINGS, "draft_chains": True},
        {**TIMINGS, "drafted_tokens": 1.5},
        {**TIMINGS, "draft_ms": "3"},
    ],
)
def test_timings_of_another_server_say_nothing_of_drafts(timings):
    assert read((1, text("a", "stop")), (2, chat(choices=[], timings=timings)), (3, DONE)).drafting is None


def test_which_of_several_engines_served_is_read_from_its_timings():
    route = {"engine": "replica-1", "attempt": 2, "reason": "least queued"}
    result = read((1, text("x", "stop")), (2, chat(choices=[], timings=TIMINGS | {"route": route})), (2, DONE))
    assert result.served == Served("replica-1", 2) and result.drafting is not None
    for odd in ({"engine": 1}, "somewhere", None, {}):
        assert read((1, text("x", "stop")), (2, chat(choices=[], timings={"route": odd})), (2, DONE)).served is None


def test_with_usage_in_every_chunk_tokens_are_known_chunk_by_chunk():
    def piece(content, count):
        return chat(choices=[{"delta": {"content": content}}], usage={"completion_tokens": count})

    found = read((1, piece("a", 1)), (2, piece("bcd", 4)), (3, piece("", 4)), (4, text(None, "stop")), (5, DONE))
    assert found.chunk_tokens == [1, 4] and found.output_tokens == 4
    assert read((1, text("a")), (2, piece("b", 2)), (3, text(None, "stop"))).chunk_tokens == [2]
