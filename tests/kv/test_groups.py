"""Which caches share blocks, and how many blocks there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contracts.drafter import DrafterKV
from engine.contracts.graph import KVSpec, Reach, StateSpec, TokenShare
from engine.contracts.kv_allocator import KVGroup
from engine.kv.groups import PoolShape, cache_groups, one_group

FULL, WINDOW, CHUNK = KVSpec(2, 8), KVSpec(2, 8, Reach("window", 100)), KVSpec(2, 8, Reach("chunked", 100))
ALTERNATING = (WINDOW, FULL, WINDOW, KVSpec(4, 16), KVSpec(2, 8, Reach("window", 40)))


def test_caches_that_are_read_alike_are_one_group_whatever_their_shape() -> None:
    found = cache_groups(ALTERNATING)
    assert found.group_of == (0, 1, 0, 1, 2)
    assert found.reaches == (Reach("window", 100), Reach(), Reach("window", 40))
    assert found.members(1) == (1, 3)
    assert cache_groups([WINDOW, CHUNK]).group_of == (0, 1), "a window is no chunk"


def test_a_drafters_own_caches_are_in_the_groups_that_they_fit() -> None:
    kept = DrafterKV((KVSpec(1, 4),) * 2)
    assert cache_groups([FULL], kept).group_of == (0, 0, 0)
    assert cache_groups(ALTERNATING, kept).group_of == (0, 1, 0, 1, 2, 1, 1)
    only_windows = cache_groups([WINDOW, WINDOW], kept)
    assert (only_windows.group_of, only_windows.reaches) == ((0, 0, 1, 1), (Reach("window", 100), Reach()))
    assert cache_groups([FULL, WINDOW], DrafterKV((WINDOW,))).group_of == (0, 1, 1)
    assert cache_groups([FULL], DrafterKV(shared_layers=2)).group_of == (0,)


def test_a_drafter_keeps_tokens_that_ranks_share_out_in_a_group_of_its_own() -> None:
    found = cache_groups([FULL, WINDOW, FULL], DrafterKV((FULL, WINDOW)), dcp=2)
    assert found.group_of == (0, 1, 0, 2, 1)
    assert [reach.kind for reach in found.reaches] == ["full", "window", "full"]
    own = [replace(FULL, tokens=TokenShare(2, 1)), WINDOW, replace(FULL, tokens=TokenShare(2, 1))]
    placed = cache_groups(own, DrafterKV((FULL, WINDOW)))
    assert placed.group_of == found.group_of and placed.token_shares == (TokenShare(2, 1), None, None)
    assert placed.block_sizes(32) == (16, 32, 32)


def test_for_a_text_at_hand_all_caches_may_share_blocks() -> None:
    assert one_group(ALTERNATING).group_of == (0,) * 5 and one_group(ALTERNATING).reaches == (Reach(),)


def shape(*windows: int | None, step_tokens: int = 32) -> PoolShape:
    reaches = tuple(Reach() if window is None else Reach("window", window) for window in windows)
    return PoolShape(reaches, (1000, 10, 1)[: len(windows)], 16, 1000, step_tokens, max_requests=4, full_share=0.25)


def test_one_group_of_all_tokens_has_the_blocks_it_is_given() -> None:
    pool = shape(None)
    assert [pool.blocks(count) for count in (1, 2, 64, 1000)] == [(1,), (2,), (64,), (1000,)]
    assert [pool.fitting(size, 64) for size in (0, 999, 1000, 64_999, 65_000)] == [0, 0, 1, 64, 64]


@pytest.mark.parametrize("window", [1, 16, 100, 101, 900, 5000])
@pytest.mark.parametrize("step_tokens", [1, 16, 33])
def test_a_window_and_a_step_lie_within_the_blocks_of_a_request_wherever_they_begin(
    window: int, step_tokens: int
) -> None:
    lie_within(Reach("window", window), step_tokens)


@pytest.mark.parametrize("reach", [Reach("chunked", 1), Reach("chunked", 100), Reach("chunked", 320), Reach("state")])
@pytest.mark.parametrize("step_tokens", [1, 16, 33])
def test_so_do_a_chunk_and_a_state(reach: Reach, step_tokens: int) -> None:
    lie_within(reach, step_tokens)


def lie_within(reach: Reach, step_tokens: int) -> None:
    pool = PoolShape((reach,), (10,), 16, 1000, step_tokens, 4, full_share=1.0)
    most, group = pool.most_blocks(0), KVGroup(0, (0,), reach.kind, 1, 99, reach.tokens)
    for computed in range(1000 - step_tokens + 1):
        held = -(-(computed + step_tokens) // 16) - group.num_passed(computed, 16)
        assert held <= most, f"{held} blocks at {computed}"


@pytest.mark.parametrize("full_share", [0.03, 0.16, 0.5, 0.9])
@pytest.mark.parametrize(("window", "max_len"), [(128, 131_072), (1024, 131_072), (1024, 4096), (4096, 32_768)])
def test_of_a_pool_of_bytes_the_shortest_and_the_longest_requests_can_use_alike_and_more_than_half(
    full_share: float, window: int, max_len: int
) -> None:
    """However many layers have windows, and whatever comes."""
    reaches = Reach(), Reach("window", window)
    pool = PoolShape(reaches, (1, 1), 16, max_len, step_tokens=16, max_requests=10**6, full_share=full_share)
    full, windows = pool.blocks(100 * max_len // 16 + 1)
    taken = full * full_share + windows * (1 - full_share)
    # As many short requests as windows have blocks for, as many of the longest as the others have blocks for.
    short, longest = windows, full * (full_share + (1 - full_share) * (window + 16) / max_len)
    assert short / taken == pytest.approx(longest / taken, rel=1e-3) and short > taken / 2
    assert pool.requests(full, max_len) == 100 and pool.requests(full, 16) == windows - 1


def test_memory_for_one_request_holds_it_and_with_more_every_group_grows() -> None:
    pool = replace(shape(None, 100, 40), for_one=63)
    a_window, narrow = -(-132 // 16) + 1, -(-72 // 16) + 1
    for count, windows, others in ((5, 5, 5), (8, 8, narrow), (63, a_window, narrow)):
        assert pool.blocks(count + 1) == (count + 1, windows + 1, others + 1)
    assert pool.requests(64, 1000) == 1
    split = replace(pool, for_one=0).blocks(72)
    assert pool.blocks(72) == split and split[1] > a_window + 8
    assert pool.blocks(68)[1] - 1 == a_window + (67 - 63) * (split[1] - 1 - a_window) // 8
    assert pool.num_bytes(64) == 1000 * 64 + 10 * (a_window + 1) + narrow + 1


@pytest.mark.parametrize("for_one", [0, 63])
@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_more_blocks_of_one_group_are_never_fewer_of_another(for_one: int, caches_prefixes: bool) -> None:
    """So what all ranks have memory for is what the one with the least has memory for."""
    pool = replace(shape(None, 100, 40, 5000), for_one=for_one, caches_prefixes=caches_prefixes)
    for count in range(2, 300):
        fewer, more = pool.blocks(count - 1), pool.blocks(count)
        assert all(few <= many <= count for few, many in zip(fewer, more, strict=True)), f"{fewer}, then {more}"


def test_without_cached_prefixes_windows_of_all_rows_are_enough() -> None:
    pool = replace(shape(None, 100), caches_prefixes=False)
    assert pool.blocks(10_000) == (10_000, 4 * pool.most_blocks(1) + 1)
    assert pool.requests(10_000, 1000) == 4


def test_where_all_caches_have_windows_a_pool_is_for_the_tokens_that_it_says() -> None:
    found = cache_groups([WINDOW, WINDOW])
    pool = PoolShape(found.reaches, (10,), 16, 1000, 32, 4, found.full_share)
    assert found.full_share == 1.0 and pool.blocks(200) == (200,)


def test_groups_are_split_by_what_a_token_leaves_in_all_caches() -> None:
    assert cache_groups(ALTERNATING).full_share == (2 * 8 + 4 * 16) / (4 * 2 * 8 + 4 * 16)
    assert cache_groups([FULL, CHUNK, CHUNK, CHUNK]).full_share == 0.25
    assert cache_groups([FULL, StateSpec(3, 1000)]).full_share == 1.0


def test_the_pool_of_a_state_is_for_all_rows_and_a_step_however_short_requests_are() -> None:
    pool = PoolShape((Reach(), Reach("state")), (1000, 10), 16, 1000, 32, max_requests=4, full_share=1.0)
    for blocks, states in ((3, 3), (10, 10), (40, 4 * 4 + 2), (1000, 4 * 4 + 2)):
        assert pool.blocks(blocks + 1) == (blocks + 1, states + 1)
    alone = PoolShape((Reach("state"),), (10,), 16, 1000, 32, max_requests=1, full_share=1.0)
    assert alone.blocks(100)[0] - 1 >= alone.most_blocks(0)


@pytest.mark.parametrize("size", [0, 1009, 1010, 12_345, 1_000_000, 123_456_789])
def test_the_largest_pool_that_fits_is_found(size: int) -> None:
    pool = shape(None, 100, 40)
    blocks = pool.fitting(size, 1 << 20)
    assert (blocks == 0 or pool.num_bytes(blocks) <= size) and pool.num_bytes(blocks + 1) > size


def test_a_rank_of_states_alone_has_room_for_all_blocks_of_the_others() -> None:
    pool = PoolShape((Reach(), Reach("state")), (0, 10), 16, 1000, 32, max_requests=4, full_share=1.0)
    assert pool.fitting(1000, most=253) == 253 and pool.fitting(100, most=253) == 10


def test_an_allocator_is_told_kind_window_and_blocks_of_each_group() -> None:
    found = cache_groups([FULL, WINDOW])
    full, window = PoolShape(found.reaches, (64, 32), 16, 1000, 32, 4, found.full_share, for_one=63).groups(found, 64)
    assert (full.kind, full.num_blocks, full.most_blocks, full.name) == ("full", 64, 63, "full")
    assert (window.kind, window.num_blocks, window.most_blocks, window.name) == ("window", 11, 10, "window_100")


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "passed"),
    [
        ("full", None, 1000, 0), ("latent", None, 1000, 0),
        ("window", 16, 0, 0), ("window", 16, 30, 0), ("window", 16, 31, 1), ("window", 16, 46, 1), ("window", 1, 33, 2),
        ("chunked", 32, 31, 0), ("chunked", 32, 32, 2), ("chunked", 32, 63, 2), ("chunked", 24, 50, 3),
        ("state", None, 31, 0), ("state", None, 32, 1), ("state", None, 47, 1), ("state", None, 48, 2),
    ],
)  # fmt: skip
def test_a_block_is_passed_when_no_later_query_sees_its_last_token(kind, window, tokens, passed) -> None:
    group = KVGroup(0, (0,), kind, 1, 9, window)
    assert group.num_passed(tokens, 16) == passed
