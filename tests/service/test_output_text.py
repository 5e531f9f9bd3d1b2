"""The text of an output ends where a stop string says, also one that spells what is not shown."""

from __future__ import annotations

import pytest

from engine.service.output_text import OutputText

from .fakes import END, SPECIALS, ids, make_tokenizer

TOKENIZER = make_tokenizer()
IM_END = TOKENIZER.special_ids[SPECIALS[1]]


def text_of(tokens: tuple[int, ...], *stop: str, **options: object) -> tuple[str, bool]:
    text = OutputText(TOKENIZER, ids("prompt"), stop, **options)  # type: ignore[arg-type]
    shown = ""
    for token in tokens:
        shown += text.feed(token)
        if text.stopped:
            break
    else:
        shown += text.finish()
    assert text.shown == len(shown)
    return shown, text.stopped


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("stop", ["<|im_end|>", "o<|im_end|>", "<|im_end|>w", "lo<|im_end|>wo"])
def test_a_stop_that_spells_a_special_token_ends_the_text(stop: str, skips: bool) -> None:
    tokens = (*ids("hello"), IM_END, *ids("world"))
    whole = "hello<|im_end|>world"
    assert text_of(tokens, stop, skip_special_tokens=skips) == (whole[: whole.index(stop)], True)
    assert text_of(tokens, stop, skip_special_tokens=skips, include_stop=True) == (
        whole[: whole.index(stop) + len(stop)],
        True,
    )


def test_part_of_the_name_of_a_hidden_token_is_no_text() -> None:
    tokens = (*ids("a"), IM_END, *ids("b"))
    assert text_of(tokens, "im_end", "<|") == ("ab", False)
    assert text_of(tokens, "im_end", skip_special_tokens=False) == ("a<|", True)


def test_a_stop_is_met_across_a_hidden_token() -> None:
    assert text_of((*ids("xa"), END, *ids("bc")), "ab", "<|im_end|>") == ("x", True)


def test_a_special_token_spelled_by_plain_tokens_is_a_stop_like_any_other() -> None:
    assert text_of(ids("a<|im_end|>b"), "<|im_end|>") == ("a", True)


@pytest.mark.parametrize(
    ("text", "min_tokens", "expected"),
    [
        ("abSTOPcd", 4, ("ab", True)),  # begins within, completes after
        ("abSTOPcd", 5, ("ab", True)),
        ("abSTOPcd", 6, ("abSTOPcd", False)),  # completes within
        ("abSTOPcdSTOPe", 6, ("abSTOPcd", True)),
        ("aSTOSTOP", 4, ("aSTO", True)),
        ("abSTOP", 0, ("ab", True)),
    ],
)
def test_a_stop_counts_where_it_is_complete(text: str, min_tokens: int, expected: tuple[str, bool]) -> None:
    assert text_of(ids(text), "STOP", min_tokens=min_tokens) == expected


def test_a_stop_may_overlap_one_that_came_too_early() -> None:
    assert text_of(ids("aaa"), "aa", min_tokens=2) == ("a", True)


def test_nothing_of_a_stop_is_shown_before_it_is_decided() -> None:
    text = OutputText(TOKENIZER, (), ("STOP",), min_tokens=3)
    assert [text.feed(token) for token in ids("aST")] == ["a", "", ""]
    assert text.feed(ids("x")[0]) == "STx"
