import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.drafter import DraftRow
from engine.testing.drafter import HostDrafterConformance
from engine_plugins.drafter.suffix import LONG_RUN, OCCURRENCES, SuffixConfig, SuffixDrafter, Texts, continued


def make(**config):
    return SuffixDrafter(SuffixConfig(**{"min_confidence": 0.0, **config}), None)


def propose(drafter, tokens, drafts=4, row_id=0, prompt_len=1, salt=""):
    (draft,) = drafter.propose([DraftRow(row_id, tokens, prompt_len, drafts, salt)]).tokens
    return draft


def answer(drafter, prompt, output, row_id=0, salt=""):
    """A whole request: its output is in the drafter's memory afterwards."""
    propose(drafter, [*prompt, *output], row_id=row_id, prompt_len=len(prompt), salt=salt)
    drafter.release(row_id)


class TestSuffixConformance(HostDrafterConformance):
    def make(self):
        return make(max_width=5)


def test_what_followed_the_longest_match_is_proposed():
    assert propose(make(), [7, 1, 2, 5, 5, 0, 1, 2, 6, 6, 7, 1, 2], drafts=1) == (5,)


def test_of_equally_long_matches_the_most_frequent_continuation_wins_and_of_those_the_latest():
    assert propose(make(), [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], drafts=1) == (3,)
    assert propose(make(), [1, 2, 3, 9, 8, 1, 2, 4, 7, 1, 2], drafts=1) == (4,)


def test_new_text_gets_no_proposal():
    assert propose(make(), list(range(50))) == ()
    assert propose(make(), [1]) == ()


def test_a_repeating_text_is_continued_beyond_its_end():
    assert propose(make(), [9, 1, 2, 3, 1, 2, 3], drafts=7) == (1, 2, 3, 1, 2, 3, 1)


def test_outputs_of_finished_requests_are_continued_in_others():
    drafter = make()
    answer(drafter, [1, 2], [30, 31, 32, 33, 34])
    assert propose(drafter, [8, 9, 30, 31], row_id=1) == (32, 33, 34)


def test_prompts_of_others_and_texts_end_to_end_are_not_matched():
    drafter = make()
    answer(drafter, [1, 2, 3, 4], [5, 6])
    answer(drafter, [1, 2, 3, 4], [7, 8])
    assert propose(drafter, [9, 1, 2]) == ()
    assert propose(drafter, [9, 5, 6], row_id=1) == ()
    assert propose(drafter, [9, 6, 7], row_id=2) == ()


def test_a_tenants_tokens_never_show_in_anothers_drafts():
    drafter = make()
    answer(drafter, [1], [30, 31, 32, 33], salt="ours")
    assert propose(drafter, [30, 31], salt="theirs") == ()
    assert propose(drafter, [30, 31], row_id=1) == ()
    assert propose(drafter, [30, 31], row_id=2, salt="ours") == (32, 33)


def test_the_oldest_outputs_are_forgotten_and_memory_is_bounded():
    drafter = make(remembered_tokens=100)
    for i in range(60):
        answer(drafter, [0], [1000 + 10 * i + j for j in range(10)], salt=f"tenant {i % 3}")
        assert held(drafter) <= 100
    assert propose(drafter, [1590, 1591], salt="tenant 2") == (1592, 1593, 1594, 1595)
    assert propose(drafter, [1550, 1551], row_id=1, salt="tenant 1") != ()
    assert propose(drafter, [1000, 1001], row_id=2, salt="tenant 0") == ()


def held(drafter):
    halves = (drafter._memory._new, drafter._memory._old)
    return sum(token >= 0 for half in halves for texts in half.values() for token in texts.tokens)


def test_of_an_output_longer_than_the_memory_the_end_is_kept():
    drafter = make(remembered_tokens=20)
    answer(drafter, [0], list(range(100, 200)))
    assert propose(drafter, [190, 191]) == (192, 193, 194, 195)
    assert propose(drafter, [170, 171], row_id=1) == ()


def test_nothing_is_remembered_where_nothing_may_be():
    drafter = make(remembered_tokens=0)
    answer(drafter, [1], [30, 31, 32, 33])
    assert propose(drafter, [30, 31]) == ()


def test_a_draft_is_short_where_it_is_unsure_and_long_where_it_is_not():
    sure, unsure = [*range(100, 120)] * 2, [*range(100, 120), 118, 119]
    drafter = make(min_confidence=0.3)
    assert len(propose(drafter, sure, drafts=8)) == 8
    assert 1 <= len(propose(drafter, [*unsure[:20], 5, 100, 101], drafts=8, row_id=1)) < 8
    split = [token for last in range(6) for token in (1, 2, 10 + last)] + [1, 2]
    assert propose(drafter, split, drafts=8, row_id=2) == ()


def test_a_place_after_the_end_of_a_finished_text_has_no_say():
    assert continued([([1, 2, 3, -1], 2), ([4, 5, 6, 7], 3)], 2, 4, 0.0)[0] == 3
    assert continued([([1, 2, 3, -1], 3)], 2, 4, 0.0) == ()


tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def defined_matches(texts, tail, shortest):
    """The definition in slow loops: (equal tokens, what follows), the latest first."""
    for n in (LONG_RUN * shortest, shortest):
        if len(tail) < n:
            continue
        found = []
        for text in texts:
            for end in range(n, len(text)):
                if text[end - n : end] == tail[-n:]:
                    equal = n
                    while equal < min(end, len(tail)) and text[end - 1 - equal] == tail[-1 - equal]:
                        equal += 1
                    found.append((equal, text[end]))
        if found:
            return found[::-1][:OCCURRENCES]
    return []


@settings(max_examples=150, derandomize=True)
@given(st.lists(tokens_of, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 2))
def test_matches_are_the_definition(texts, tail, shortest):
    stored = Texts(shortest)
    for text in texts:
        stored.append(text)
        stored.close()
    found = [(equal, stored.tokens[at]) for equal, at in stored.matches(tail)]
    assert found == defined_matches(texts, tail, shortest)


@settings(max_examples=100, derandomize=True)
@given(tokens_of, st.lists(st.integers(1, 7), max_size=6))
def test_growing_piece_by_piece_is_the_same_as_starting_anew(tokens, pieces):
    grown = make()
    at = 1
    for piece in [*pieces, len(tokens)]:
        at = min(len(tokens), at + piece)
        assert propose(grown, tokens[:at]) == propose(make(), tokens[:at])


def test_a_token_more_costs_the_same_however_long_the_history():
    class Counted(list):
        read = 0

        def __getitem__(self, key):
            got = super().__getitem__(key)
            Counted.read += len(got) if isinstance(key, slice) else 1
            return got

    rng = random.Random(1)
    for text in ([5] * 30_100, [rng.randrange(50) for _ in range(30_100)]):
        drafter = make()
        propose(drafter, text[:30_000])
        texts = drafter._requests[0].texts
        texts.tokens, Counted.read = Counted(texts.tokens), 0
        for more in range(1, 11):
            propose(drafter, text[: 30_000 + more])
        assert 0 < Counted.read < 10 * 60 * OCCURRENCES


@pytest.mark.parametrize(
    "config",
    [{"min_match": 0}, {"min_match": 3, "max_match": 2}, {"min_confidence": 1.5}, {"remembered_tokens": -1}],
)
def test_senseless_settings_are_refused_by_name(config):
    (name,) = list(config)[-1:]
    with pytest.raises(ValueError, match=rf"drafter\.{name}"):
        SuffixConfig(**config)
