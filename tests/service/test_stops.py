from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from engine.service.detokenizer import IncrementalDetokenizer, TokenBytes, byte_of_symbol
from engine.service.stops import StopMatcher

SYMBOLS = {byte: symbol for symbol, byte in byte_of_symbol().items()}

pieces = st.lists(st.text(alphabet="abc", max_size=3), max_size=12)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(parts: list[str], stop: list[str], include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(tuple(stop), include)
    shown = ""
    for part in parts:
        released = matcher.feed(part)
        shown += released.text
        if released.stop is not None:
            return shown, True
    return shown + matcher.flush(), False


@given(pieces, stops, st.booleans())
@settings(max_examples=120)
def test_the_result_does_not_depend_on_how_text_is_cut(parts: list[str], stop: list[str], include: bool) -> None:
    text = "".join(parts)
    assert run(parts, stop, include) == run(list(text), stop, include) == run([text], stop, include)


@given(pieces, stops)
@settings(max_examples=120)
def test_no_stop_string_is_ever_shown_and_nothing_else_is_lost(parts: list[str], stop: list[str]) -> None:
    text = "".join(parts)
    shown, stopped = run(parts, stop)
    assert text.startswith(shown)
    assert not any(s in shown for s in stop)
    assert stopped == any(s in text for s in stop)
    assert stopped or shown == text


def test_a_partial_stop_is_held_back_until_it_is_decided() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.feed("one ST").text == "one "
    assert matcher.feed("O").text == ""
    assert matcher.feed("X").text == "STOX"


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["xay"], ["xay", "a"]) == ("x", True)


def test_an_included_stop_ends_the_text() -> None:
    assert run(["he", "llo END more"], ["END"], include=True) == ("hello END", True)


def every_split(data: bytes) -> Iterator[list[bytes]]:
    """All ways to cut ``data`` into pieces."""
    for mask in range(2 ** (len(data) - 1)):
        cuts = [0, *(i + 1 for i in range(len(data) - 1) if mask >> i & 1), len(data)]
        yield [data[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("a\U0001f600bc END x".encode(), ["END"]),
        ("\u00e9\u00e9\u00e9abab".encode(), ["\u00e9a", "bab"]),
        (b"aaabaaacaaab", ["aaac", "aab!"]),
        (b"ab\xff\xf0\x9f\x98 end", ["\ufffd e"]),
        ("\U0001f600\U0001f600\U0001f600".encode(), ["\U0001f600\U0001f600"]),
        (b"never stops", ["stopped", "ss"]),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_every_way_to_cut_bytes_into_tokens_gives_the_same_text(text: bytes, stop: list[str], include: bool) -> None:
    """Characters cut in two, and stop strings cut anywhere: from one token of everything to one for each byte."""
    whole = run([text.decode("utf-8", "replace")], stop, include)
    for tokens in every_split(text):
        vocab = {i: "".join(SYMBOLS[byte] for byte in token) for i, token in enumerate(tokens)}
        detokenizer = IncrementalDetokenizer(TokenBytes({"type": "ByteLevel"}, decoders.ByteLevel(), vocab))
        parts = [*map(detokenizer.feed, range(len(tokens))), detokenizer.flush()]
        assert run(parts, stop, include) == whole, tokens


def test_less_is_held_back_than_the_longest_stop_so_that_a_token_costs_the_same_anywhere() -> None:
    """Beginnings that go on and on, and fail late."""
    stop = ["ab" * 200 + "!", "a" * 500, "ba" * 250 + "c"]
    matcher, fed, shown = StopMatcher(tuple(stop)), 0, 0
    for _ in range(20):
        for piece in ["ab"] * 300 + ["a"] * 499 + ["x"] + ["ba"] * 251:
            fed += len(piece)
            shown += len(matcher.feed(piece).text)
            assert fed - shown < max(map(len, stop))
    assert shown + len(matcher.flush()) == fed


hidden_pieces = st.lists(st.tuples(st.text(alphabet="ab<>", max_size=3), st.booleans()), max_size=10)


def run_hidden(
    parts: list[tuple[str, bool]], stop: list[str], spelled: list[str], include: bool, free: int = 0
) -> tuple[str, bool]:
    """``free``: so many parts complete no stop string."""
    matcher = StopMatcher(tuple(stop), include, tuple(spelled))
    shown = ""
    for i, (part, hidden) in enumerate(parts):
        released = matcher.feed(part, hidden, may_stop=i >= free)
        shown += released.text
        if released.stop is not None:
            return shown, True
    return shown + matcher.flush(), False


def by_definition(
    parts: list[tuple[str, bool]], stop: list[str], spelled: list[str], include: bool, free: int = 0
) -> tuple[str, bool]:
    """Character by character, from all the text so far."""
    visible, whole, before = "", "", [0]
    for i, (part, hidden) in enumerate(parts):
        for character in part:
            whole += character
            visible += "" if hidden else character
            before.append(len(visible))
            found = [] if hidden else [(len(visible) - len(s), s) for s in stop if visible.endswith(s)]
            found += [(before[len(whole) - len(s)], s) for s in spelled if whole.endswith(s)]
            if found and i >= free:
                start, text = min(found, key=lambda match: match[0])
                return visible[:start] + (text if include else ""), True
    return visible, False


@given(hidden_pieces, stops, st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=3), st.integers(0, 4))
@settings(max_examples=160)
def test_stops_are_met_in_what_is_visible_and_in_what_is_spelled_out(
    parts: list[tuple[str, bool]], stop: list[str], spelled: list[str], free: int
) -> None:
    stop = [*stop, *spelled]
    assert run_hidden(parts, stop, spelled, False, free) == by_definition(parts, stop, spelled, False, free)


def test_a_stop_with_a_hidden_token_in_it_is_held_back_and_shown_only_if_it_is_to_be() -> None:
    parts, stop = [("hi", False), ("\n", False), ("<end>", True), ("\n", False)], ["\n<end>\n"]
    assert run_hidden(parts, stop, stop, False) == ("hi", True)
    assert run_hidden(parts, stop, stop, True) == ("hi\n<end>\n", True)
    assert run_hidden(parts[:3], stop, stop, False) == ("hi\n", False)


def test_tokens_without_text_are_not_kept_while_text_is_held_back() -> None:
    matcher = StopMatcher(("ab", "<end>b"), False, ("<end>b",))
    matcher.feed("a")
    for _ in range(100):
        matcher.feed("<end>", hidden=True)
    assert len(matcher._offsets) < 6
    assert matcher.feed("x").text == "ax"
