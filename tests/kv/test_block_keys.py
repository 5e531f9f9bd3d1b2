from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.block_keys import BlockKeys

TOKENS = list(range(1000, 1050))


def test_only_full_blocks_have_keys_and_what_is_before_them() -> None:
    keys = BlockKeys(("m",), 8)
    assert [len(keys.extend(TOKENS[:n])) for n in (0, 7, 8, 15, 16)] == [1, 1, 2, 2, 3]


@settings(max_examples=50, derandomize=True)
@given(cuts=st.lists(st.integers(0, 50)))
def test_growing_token_by_token_gives_the_keys_of_the_whole(cuts: list[int]) -> None:
    whole = BlockKeys(("m",), 8).extend(TOKENS)
    grown = BlockKeys(("m",), 8)
    for cut in sorted(cuts):
        grown.extend(TOKENS[:cut])
    assert grown.extend(TOKENS) == whole


def test_a_changed_token_changes_its_block_and_all_later_ones() -> None:
    changed = [*TOKENS[:20], 5, *TOKENS[21:]]
    ours, theirs = BlockKeys((), 8).extend(TOKENS), BlockKeys((), 8).extend(changed)
    assert [a == b for a, b in zip(ours, theirs)] == [True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(("a",), ("b",)), (("ab", "c"), ("a", "bc")), (("a",), ("a", "")), ((), ("",))],
)
def test_whatever_differs_in_the_salt_separates_the_chains(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    assert not set(BlockKeys(ours, 8).extend(TOKENS)) & set(BlockKeys(theirs, 8).extend(TOKENS))


def test_text_and_bytes_salt_mean_the_same() -> None:
    assert BlockKeys(("tenant", b"model"), 8).extend(TOKENS) == BlockKeys((b"tenant", "model"), 8).extend(TOKENS)


def test_keys_are_the_same_in_every_process() -> None:
    first = BlockKeys(("tenant", "model"), 8).extend(TOKENS)[1]
    assert first.hex() == "4f424daf4551b559f45b259955b11580464e129fee89038c1cf6e4eff7d0a152"


def test_token_ids_beyond_16_bits_do_not_collide() -> None:
    assert BlockKeys((), 8).extend([1] * 8)[1] != BlockKeys((), 8).extend([65537] * 8)[1]
