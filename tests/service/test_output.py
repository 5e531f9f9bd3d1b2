"""What a client sees of one sequence, however the engine cuts its tokens into steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.contracts.request import TokenLogprobs, TokensOut
from engine.service.output import Delta, Output, joined
from engine.service.output_text import OutputText

from .fakes import END, ids, make_tokenizer

TOKENIZER = make_tokenizer()


class Recorded:
    """An output, and how often it asked the engine to stop."""

    def __init__(self, *stops: str, wants_logprobs: bool = False, **options: Any) -> None:
        self.asked = 0
        text = OutputText(TOKENIZER, (), stops, **options)
        self.output = Output(text, self._ask, wants_logprobs=wants_logprobs)

    def _ask(self) -> None:
        self.asked += 1

    def take(self, tokens: Sequence[int], **fields: Any) -> Delta | None:
        logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
        return self.output.take(TokensOut("a", tuple(tokens), logprobs=logprobs, **fields))


def test_every_token_is_in_one_delta_whether_its_text_is_out_or_not() -> None:
    found = Recorded()
    euro = "€".encode()
    assert found.take(euro[:1]) is None
    first, last = found.take(euro[1:]), found.take((*ids("a"), END), finish_reason="stop", stop_token=END)
    assert first is not None and last is not None
    assert (first.text, first.token_ids, first.finish_reason) == ("€", tuple(euro), None)
    assert (last.text, last.token_ids, last.finish_reason) == ("a", (*ids("a"), END), "stop")
    whole = joined([first, last])
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("€a", (*euro, *ids("a"), END), "stop")


def test_a_stop_string_ends_the_text_and_the_engine_is_told_once() -> None:
    found = Recorded("lo", wants_logprobs=True)
    delta = found.take(ids("hello you"))
    assert delta is not None and delta.text == "hel" and found.asked == 1
    assert [shown.token for shown in delta.tokens] == list(ids("hel")) and found.output.tokens == list(ids("hello"))
    assert found.take(ids("more")) is None
    last = found.take((), finish_reason="stop")
    assert last is not None and (last.text, last.finish_reason, last.token_ids) == ("", "stop", ())
    assert found.asked == 1


def test_a_stop_string_that_the_last_step_completes_needs_no_word_to_the_engine() -> None:
    found = Recorded("lo")
    delta = found.take(ids("hello"), finish_reason="length")
    assert delta is not None and (delta.text, delta.finish_reason, found.asked) == ("hel", "stop", 0)


def test_a_token_like_the_one_that_ends_the_output_is_text_before_its_end() -> None:
    """As with ``min_tokens``: within them, a stop token does not end the output."""
    found = Recorded(min_tokens=2)
    (a,) = ids("a")
    delta = found.take((a, *ids("b"), a), finish_reason="stop", stop_token=a)
    assert delta is not None and delta.text == "ab" and found.output.stop_token == a


def test_prompt_logprobs_are_in_the_first_delta() -> None:
    found, scored = Recorded(), (None, TokenLogprobs(1, -1.0, ()))
    first, second = found.take(ids("a"), prompt_logprobs=scored), found.take(ids("b"))
    assert first is not None and second is not None
    assert (first.prompt_logprobs, second.prompt_logprobs) == (scored, ())


@pytest.mark.parametrize(("error", "why"), [("boom", "boom"), ("", "the sequence was aborted")])
def test_a_sequence_that_fails_has_no_last_delta(error: str, why: str) -> None:
    found = Recorded()
    assert found.take(ids("a"), finish_reason="error", error=error) is None
    assert (found.output.failure, found.output.finish_reason) == (why, None)
