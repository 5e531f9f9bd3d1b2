"""What a provider's stream says of its tokens."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from engine.contracts.config import ProviderSettings
from engine.http.gateway.usage import MOST_HELD, MOST_TOKENS, Usage, UsageReader, asks_for_usage, usage_of

TEXTS = ["a", '"usage"', "b\\n\\nc"]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}


def stream(end: str = "\n\n", last: Any = None) -> tuple[list[bytes], bytes]:
    """Events of a stream, and the one with usage alone."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}], "usage": None} for text in TEXTS]
    events = [f"data: {json.dumps(chunk)}{end}".encode() for chunk in chunks]
    usage = {"choices": [], "usage": USAGE} if last is None else last
    return events, f"data: {json.dumps(usage)}{end}".encode()


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("hides", [True, False])
def test_usage_is_read_wherever_the_stream_is_cut_and_left_out_if_only_the_gateway_wants_it(
    end: str, hides: bool
) -> None:
    events, usage = stream(end)
    done = f"data: [DONE]{end}".encode()
    data, rng = b"".join([*events, usage, done]), random.Random(0)
    for _ in range(200):
        reader, out, at = UsageReader(hides), b"", 0
        while at < len(data):
            size = rng.randrange(1, 60)
            out += reader.feed(data[at : at + size])
            at += size
        out += reader.end()
        assert out == b"".join([*events, *[usage] * (not hides), done])
        assert reader.usage == Usage(7, 3)


def test_usage_beside_text_is_read_and_passed_on() -> None:
    events, last = stream(last={"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE})
    reader = UsageReader(True)
    assert reader.feed(b"".join(events) + last) == b"".join(events) + last
    assert reader.usage == Usage(7, 3)


def test_a_whole_event_waits_for_nothing() -> None:
    events, _ = stream()
    reader = UsageReader(True)
    assert [reader.feed(event) for event in events] == events


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    reader = UsageReader(True)
    piece = b"x" * 65536
    out = b"".join([reader.feed(piece) for _ in range(64)])
    assert len(out) > 64 * 65536 - MOST_HELD - 65536
    assert out + reader.end() == piece * 64


def test_an_event_in_small_pieces_is_searched_once() -> None:
    reader, begun_s = UsageReader(True), time.process_time()
    for _ in range(MOST_HELD // 64):
        assert reader.feed(b"x" * 64) == b""
    assert time.process_time() - begun_s < 5.0, "it grows faster than the event"
    assert reader.feed(b"\n\n") == b"x" * MOST_HELD + b"\n\n"


def test_comments_do_not_wait_for_a_blank_line() -> None:
    reader = UsageReader(True)
    assert reader.feed(b": keepalive\n") == b": keepalive\n"
    assert reader.feed(b": keepal") + reader.feed(b"ive\ndata: 1\n") == b""
    assert reader.feed(b": keepalive\n") + reader.feed(b"\n") == b": keepalive\ndata: 1\n: keepalive\n\n"


@pytest.mark.parametrize("choices", ["[]", "[ ]"])
@pytest.mark.parametrize("tokens", ["-5", "1.5", "1e300", "1" + "0" * 400, '"7"', "null", "[7]", str(MOST_TOKENS + 1)])
def test_usage_that_cannot_be_counted_is_left_out_like_any_other(tokens: str, choices: str) -> None:
    event = f'data: {{"choices": {choices}, "usage": {{"prompt_tokens": {tokens}}}}}\n\n'.encode()
    reader = UsageReader(True)
    assert reader.feed(event) == b"" and reader.usage is None
    assert UsageReader(False).feed(event) == event
    assert usage_of(event[6:]) is None


def test_an_end_in_the_same_event_as_usage_is_passed_on() -> None:
    event = b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\ndata: [DONE]\n\n'
    reader = UsageReader(True)
    assert reader.feed(event) == event and reader.usage == Usage(7)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"usage": 7}', b'{"usage": {"prompt_tokens": "x"}}', b"\xff"])
def test_what_says_no_usage_says_none(data: bytes) -> None:
    assert usage_of(data) is None


def test_cost_is_of_a_million_tokens() -> None:
    provider = ProviderSettings("http://h/v1", {"a": "b"}, input_price=0.5, output_price=2.0)
    assert Usage(1_000_000, 500_000).cost(provider) == pytest.approx(1.5)


def test_clients_may_want_it_themselves() -> None:
    assert asks_for_usage({"stream_options": {"include_usage": True}})
    for options in (None, {}, {"include_usage": False}, {"include_usage": 1}, [], "x"):
        assert not asks_for_usage({"stream_options": options})
    assert not asks_for_usage({})
