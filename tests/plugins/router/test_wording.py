from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.benchmarks.semantic_cache import read_pairs

from engine_plugins.router.wording import Vocabulary, content_words, singular, why_never

PAIRS = read_pairs()
SAID = ("cat", "dog", "eats", "3", "4", "not", "in", "from", "to", "red", "big", "never", "without", "more", "less")


def same(one: str, two: str, vocabulary: Vocabulary | None = None) -> bool:
    args = () if vocabulary is None else (vocabulary,)
    return content_words(one, *args) == content_words(two, *args)


@pytest.mark.parametrize("source, most", [("first", 0), ("own", 0), ("adversarial", 23)])
def test_questions_that_ask_something_else_do_not_have_the_same_words(source: str, most: int) -> None:
    """Of those that were written against the guards, some do: see the table in docs/caches.md."""
    pairs = [pair for pair in PAIRS if pair.source == source and not pair.same]
    passed = [(pair.first, pair.second) for pair in pairs if not _refused(pair) and same(pair.first, pair.second)]
    assert len(pairs) >= 12 and len(passed) <= most, passed


@pytest.mark.parametrize(
    "kind, least", [("article and case", 14), ("contraction", 8), ("plural", 11), ("polite", 20), ("mixed", 11)]
)
def test_other_forms_of_a_question_have_the_same_words(kind: str, least: int) -> None:
    pairs = [pair for pair in PAIRS if pair.kind == kind and pair.same and pair.source == "own" and not _refused(pair)]
    assert sum(same(pair.first, pair.second) for pair in pairs) >= least - 1


def _refused(pair) -> bool:
    return bool(why_never(pair.first, 200) or why_never(pair.second, 200))


@pytest.mark.parametrize(
    "one, two",
    [
        ("Can cats eat dogs", "Can dogs eat cats"),
        ("How do I enable it?", "How do I disable it?"),
        ("Is the door open?", "Does the door open?"),
        ("What is 5!?", "What is 5?"),
        ("What is 5-3?", "What is 5 3?"),
        ("vitamin a deficiency?", "vitamin deficiency?"),
        ("How far is 5M?", "How far is 5m?"),
        ("How warm is 300 K?", "How warm is 300 k?"),
        ("a joke", "a joke?"),
        ("What is C?", "What is C++?"),
        ("What is .net?", "What is net?"),
        ("Why can't I swim?", "Why can I swim?"),
        ("Was ist der Preis?", "Was ist kein Preis?"),
    ],
)
def test_what_says_something_is_a_word(one: str, two: str) -> None:
    assert not same(one, two) and not same(two, one)


def test_synonyms_and_words_that_say_nothing_are_those_that_somebody_lists() -> None:
    one, two = "What is your price for delivery?", "What is the cost for shipping?"
    listed = Vocabulary({"price": ["cost"], "delivery": ["shipping"]}, frozenset({"your"}))
    assert not same(one, two) and same(one, two, listed)
    assert same("How do I get money back?", "How do I get a refund?", Vocabulary({"refund": ["money back"]}))


@pytest.mark.parametrize(
    "text",
    [
        "Do it again", "What about that?", "Who is he?", "What happened on 2024-05-01?", "Am I free on 3 May?",
        "What is on at 10:30?", "What is the weather today?", "Mail me at a@b.org", "Call +49 30 1234567",
        "Is card 4111 1111 1111 1111 valid?", "What does `ls` do?", 'Who said "to be"?', "What is x = 3?",
        "one line\nanother", "Translate the cat to German", "How many letters are in a word?", "x" * 201,
        "see https://example.org", "half a \ud800 character",
    ],
)  # fmt: skip
def test_some_questions_are_compared_with_equal_ones_alone(text: str) -> None:
    assert why_never(text, 200)


@pytest.mark.parametrize("text", ["How do I return an item?", "What is 3.5 + 2?", "Is 1984 a good book?", "Who am I?"])
def test_most_short_questions_may_be_compared(text: str) -> None:
    assert why_never(text, 200) == ""


@pytest.mark.parametrize(
    "plural, word",
    [("items", "item"), ("policies", "policy"), ("boxes", "box"), ("classes", "class"), ("houses", "house")]
    + [(word, word) for word in ("news", "is", "bus", "glass", "analysis", "gas", "customs")],
)
def test_the_s_of_a_plural_goes(plural: str, word: str) -> None:
    assert singular(plural) == word


@given(st.text(max_size=80))
def test_any_text_has_words_or_none(text: str) -> None:
    words = content_words(text)
    assert all(isinstance(word, str) and word for word in words)
    assert words == content_words(text)
    why_never(text, 50)


@given(st.lists(st.sampled_from(SAID), min_size=2))
def test_no_word_of_content_is_lost_and_none_moves(said: list[str]) -> None:
    found = content_words(f"which {' '.join(said)}?")
    assert len(found) == len(said) + 1
    assert list(found[1:]) == [singular(word) for word in said]
