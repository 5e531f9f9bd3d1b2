from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.stops import StopMatcher

pieces = st.lists(st.text(alphabet="abc", max_size=3), max_size=12)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(parts: list[str], stop: list[str], include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(tuple(stop), include)
    shown = ""
    for part in parts:
        released = matcher.feed(part)
        shown += released.text
        if released.stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(pieces, stops, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_result_does_not_depend_on_how_text_is_cut(parts: list[str], stop: list[str], include: bool) -> None:
    text = "".join(parts)
    assert run(parts, stop, include) == run(list(text), stop, include) == run([text], stop, include)


@given(pieces, stops)
@settings(max_examples=300, deadline=None)
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
