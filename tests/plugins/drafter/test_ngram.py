import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.drafter import DraftRow
from engine.testing.drafter import HostDrafterConformance
from engine_plugins.drafter.ngram import NgramConfig, NgramDrafter


def make(**config):
    return NgramDrafter(NgramConfig(**config), None)


def propose(drafter, tokens, drafts=4, row_id=0):
    (draft,) = drafter.propose([DraftRow(row_id, tokens, 1, drafts)]).tokens
    return draft


def looked_up(tokens, drafts, longest, shortest, window=0):
    """The definition, in one slow loop."""
    oldest = len(tokens) - window if window else 0
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if end - n >= max(0, oldest) and tokens[end - n : end] == tokens[-n:]:
                copy = list(tokens)
                for i in range(drafts):
                    copy.append(copy[end + i])
                return tuple(copy[len(tokens) :])
    return ()


class TestNgramConformance(HostDrafterConformance):
    def make(self):
        return make(max_width=5)


def test_what_followed_the_last_occurrence_is_proposed():
    assert propose(make(), [1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 8, 1, 2], drafts=3) == (5, 6, 7)


def test_a_longer_match_beats_a_later_one():
    assert propose(make(), [7, 1, 2, 5, 5, 0, 1, 2, 6, 6, 7, 1, 2], drafts=1) == (5,)


def test_new_text_gets_no_proposal():
    assert propose(make(), list(range(50))) == ()
    assert propose(make(), [1]) == ()


def test_a_repeating_text_is_continued_beyond_its_end():
    assert propose(make(max_width=7), [9, 1, 2, 3, 1, 2, 3], drafts=7) == (1, 2, 3, 1, 2, 3, 1)


def test_a_single_token_is_too_little_unless_asked_for():
    tokens = [4, 8, 5, 4]
    assert propose(make(min_match=2), tokens) == ()
    assert propose(make(min_match=1), tokens, drafts=2) == (8, 5)


def test_the_window_hides_what_is_too_far_back():
    tokens = [1, 2, 3, *range(10, 30), 1, 2]
    assert propose(make(window=10), tokens) == ()
    assert propose(make(window=0), tokens, drafts=1) == (3,)


tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=150, derandomize=True)
@given(tokens_of, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.sampled_from([0, 5, 12]))
def test_proposals_are_the_definition(tokens, drafts, shortest, more, window):
    longest = shortest + more
    drafter = make(max_width=6, min_match=shortest, max_match=longest, window=window)
    assert propose(drafter, tokens, drafts) == looked_up(tokens, drafts, longest, shortest, window)


@settings(max_examples=100, derandomize=True)
@given(tokens_of, st.lists(st.integers(1, 7), max_size=6))
def test_growing_piece_by_piece_is_the_same_as_starting_anew(tokens, pieces):
    grown = make()
    at = 1
    for piece in [*pieces, len(tokens)]:
        at = min(len(tokens), at + piece)
        assert propose(grown, tokens[:at]) == propose(make(), tokens[:at])


@settings(max_examples=100, derandomize=True)
@given(tokens_of, tokens_of)
def test_a_slot_taken_over_without_a_word_still_gets_tokens_of_its_own_history(before, after):
    drafter = make()
    propose(drafter, before)
    assert set(propose(drafter, after)) <= set(after)


def test_a_history_that_shrank_is_indexed_anew():
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    drafter = make()
    propose(drafter, tokens)
    assert propose(drafter, tokens[:6], drafts=1) == propose(make(), tokens[:6], drafts=1) == (3,)


def test_slots_do_not_see_each_other():
    drafter = make()
    rows = [DraftRow(0, [1, 2, 3, 1, 2], 1, 1), DraftRow(1, [1, 2, 4, 1, 2], 1, 1), DraftRow(2, [1, 2], 1, 1)]
    assert drafter.propose(rows).tokens == ((3,), (4,), ())


def test_growing_a_long_history_costs_only_what_is_new(monkeypatch):
    class Counted(list):
        read = 0

        def __getitem__(self, key):
            got = super().__getitem__(key)
            Counted.read += len(got) if isinstance(key, slice) else 1
            return got

    tokens = Counted(i * i % 977 for i in range(32_000))
    drafter = make()
    propose(drafter, tokens)
    Counted.read = 0
    for i in range(10):
        tokens.append(i)
        propose(drafter, tokens)
    assert Counted.read < 10 * 200


@pytest.mark.parametrize("config", [{"min_match": 0}, {"min_match": 3, "max_match": 2}, {"window": -1}])
def test_senseless_settings_are_refused_by_name(config):
    with pytest.raises(ValueError, match=r"drafter\.(min_match|max_match|window)"):
        NgramConfig(**config)
