"""How rows become launches: from shapes alone, covering every query once, within the scratch memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugins.attention_kernel.triton.planning import (
    CTAS_PER_SM,
    FEWEST_MOST_SPLITS,
    MAX_SPLITS,
    Work,
    merge_shape,
    num_splits,
    plan_work,
    scratch_rows,
    scratch_tiles,
    split_blocks,
)

DEEPSEEK_V3 = {"group": 128, "num_kv_heads": 1, "head_dim": 576, "itemsize": 2, "num_sms": 132, "latent": True}
LLAMA_8B = {"num_kv_heads": 8, "head_dim": 128, "itemsize": 2, "num_sms": 132}


def plan(q_lens: Sequence[int], kv_lens: Sequence[int] | None = None, group: int = 4) -> tuple[Work, ...]:
    return plan_work(q_lens, kv_lens or q_lens, group=group, **LLAMA_8B)


q_lens = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=20)


@given(q_lens, st.integers(1, 16))
def test_every_query_is_in_exactly_one_tile(q_lens: list[int], group: int) -> None:
    covered = [0] * len(q_lens)
    for work in plan(q_lens, group=group):
        for row, start in work.tiles:
            assert start < q_lens[row] * group
            covered[row] += min(work.block_m, q_lens[row] * group - start)
    assert covered == [q_len * group for q_len in q_lens]


@given(q_lens, st.data())
def test_context_lengths_change_nothing_but_the_order_of_prefill_tiles(q_lens: list[int], data: st.DataObject) -> None:
    longer = [q_len + data.draw(st.integers(0, 100_000)) for q_len in q_lens]
    here, there = plan(q_lens), plan(q_lens, longer)
    assert [(w.split, w.block_m, sorted(w.tiles)) for w in here] == [
        (w.split, w.block_m, sorted(w.tiles)) for w in there
    ]
    assert [w for w in here if w.split] == [w for w in there if w.split]


@given(st.integers(1, 400), st.integers(1, 10_000), st.integers(1, 64))
def test_splits_never_outgrow_the_scratch_or_the_counters(num_sms: int, programs: int, queries: int) -> None:
    splits = num_splits(programs, num_sms, queries)
    assert 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert programs * splits * split_blocks(2)[-1] <= scratch_rows(num_sms)
        assert programs <= scratch_tiles(num_sms)


@given(st.integers(1, MAX_SPLITS), st.sampled_from((16, 32, 64)), st.sampled_from((16, 64, 128, 256)))
def test_a_merge_has_a_lane_for_every_split_and_covers_the_tile_in_whole_steps(
    splits: int, block_m: int, block_d: int
) -> None:
    lanes, queries = merge_shape(splits, block_m, block_d)
    assert lanes >= splits
    assert 1 <= queries <= block_m and block_m % queries == 0


@given(q_lens, st.integers(1, 16))
def test_no_tile_holds_more_queries_than_its_launch_says(q_lens: list[int], group: int) -> None:
    for work in plan(q_lens, group=group):
        assert work.queries <= work.block_m
        for row, start in work.tiles:
            assert min(work.block_m, q_lens[row] * group - start) <= work.queries


def test_one_decoding_sequence_uses_the_whole_device() -> None:
    (work,) = plan([1], [100])
    assert num_splits(8 * len(work.tiles), 132, work.queries) * 8 >= CTAS_PER_SM * 128


@pytest.mark.parametrize("queries", [2, 4, 8, 16])
def test_verification_of_one_sequence_occupies_nearly_every_multiprocessor(queries: int) -> None:
    (work,) = plan([queries], [4000])
    assert work.split and num_splits(8 * len(work.tiles), 132, work.queries) * 8 >= 128


def test_a_full_batch_of_decodes_is_not_split() -> None:
    (work,) = plan([1] * 64)
    assert work.split and num_splits(8 * len(work.tiles), 132, work.queries) == 1


def test_a_long_prompt_beside_decodes_takes_the_prefill_kernel() -> None:
    decode, prompt = plan([1, 2000, 1])
    assert decode.split and decode.tiles == ((0, 0), (2, 0))
    assert not prompt.split and {row for row, _ in prompt.tiles} == {1}


def test_a_chunk_too_small_to_fill_the_device_is_split() -> None:
    (work,) = plan([40], [8000])
    assert work.split and work.block_m == 64


def test_the_heaviest_prefill_tiles_start_first() -> None:
    (work,) = plan([600, 600], [600, 9000])
    assert work.tiles[0][0] == 1 and work.tiles[-1] == (0, 0)


@pytest.mark.parametrize("rows", [[0], [0, 0]])
def test_rows_without_queries_launch_nothing(rows: list[int]) -> None:
    assert plan(rows) == ()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("queries", [1, 4])
def test_latent_decode_and_verification_occupy_the_device_in_tiles_as_large_as_can_be(rows: int, queries: int) -> None:
    (work,) = plan_work([queries] * rows, [4000] * rows, **DEEPSEEK_V3)
    programs = len(work.tiles) * num_splits(len(work.tiles), 132, work.queries)
    assert work.split and programs >= 128
    assert work.block_m == 32 or rows * queries * 4 * FEWEST_MOST_SPLITS < 132


def test_a_latent_prompt_takes_the_prefill_kernel() -> None:
    decode, prompt = plan_work([1, 500, 1], [3000, 900, 7], **DEEPSEEK_V3)
    assert decode.split and not prompt.split and prompt.block_m == 32
    assert sum(work.block_m * len(work.tiles) for work in (decode, prompt)) == 128 * 502
