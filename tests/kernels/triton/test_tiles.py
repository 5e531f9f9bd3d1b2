"""How products are dealt out: enough programs, whole tiles, few compilations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.triton.fragments import CHANNELS
from engine.kernels.triton.tiles import MAX_ROWS, mix_tile, skinny_tile

H200 = 132
PROJECTIONS = {
    "1B qkv": (3072, 2048), "1B out": (2048, 2048), "1B gate_up": (16384, 2048), "1B down": (2048, 8192),
    "1B head": (128256, 2048), "8B qkv": (6144, 4096), "8B out": (4096, 4096), "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336), "8B head": (128256, 4096),
}  # fmt: skip
BITS = (4, 8, 16, 32)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("bits", BITS)
def test_one_row_fills_an_h200_without_splitting_the_input(name: str, bits: int) -> None:
    out_features, in_features = PROJECTIONS[name]
    assert skinny_tile(1, out_features, in_features, H200, bits).programs(out_features) >= 256


@given(st.integers(1, 200_000), st.integers(1, 30_000), st.integers(1, 200), st.sampled_from(BITS), st.booleans())
def test_sizes_are_powers_of_two_that_tensor_cores_and_pairs_accept(
    out: int, inp: int, sms: int, bits: int, is_normed: bool
) -> None:
    for rows in (1, 2, 16, *(() if is_normed else (17, 33, 64))):
        tile = skinny_tile(rows, out, inp, sms, bits, is_normed)
        for size in (tile.block_m, tile.block_n, tile.block_k, tile.num_warps):
            assert size & (size - 1) == 0
        assert rows <= tile.block_m < max(2 * rows, 17) and tile.block_n % 2 == 0 and tile.block_k >= 32
        assert rows == 1 or tile.block_n >= 16


@given(st.integers(1, 200_000), st.integers(1, 30_000), st.sampled_from(BITS), st.booleans())
def test_two_compilations_serve_every_number_of_rows(out: int, inp: int, bits: int, is_normed: bool) -> None:
    tiles = [skinny_tile(rows, out, inp, H200, bits, is_normed) for rows in range(1, MAX_ROWS + 1)]
    assert len(set(tiles[1:])) == 1


@given(st.integers(1, 200_000), st.integers(1, 30_000), st.sampled_from([4, 8]), st.booleans())
def test_of_words_two_compilations_serve_up_to_16_rows_and_none_more(
    out: int, inp: int, bits: int, is_normed: bool
) -> None:
    tiles = [skinny_tile(rows, out, inp, H200, bits, is_normed, has_words=True) for rows in range(1, MAX_ROWS + 1)]
    assert all(tile.in_words and tile.block_n == CHANNELS for tile in tiles)
    assert {tile.block_m for tile in tiles[:8]} == {8} and {tile.block_m for tile in tiles[8:]} == {16}
    assert len(set(tiles)) == 2
    assert not skinny_tile(17, out, inp, H200, bits, has_words=True).in_words


@pytest.mark.parametrize("bits", BITS)
def test_a_tile_of_one_row_fits_in_registers(bits: int) -> None:
    for out_features, in_features in PROJECTIONS.values():
        tile = skinny_tile(1, out_features, in_features, H200, bits)
        assert tile.block_n * tile.block_k <= (64 if bits == 4 else 32) * 32 * tile.num_warps


@given(st.integers(1, 200_000), st.integers(1, 30_000), st.integers(1, 8))
def test_every_thread_has_whole_words_of_four_bit_codes_to_unpack(out: int, inp: int, top_k: int) -> None:
    """Of fewer than eight weights it would unpack what lies beside them."""
    tiles = [skinny_tile(rows, out, inp, H200, 4) for rows in (1, 2, 16)]
    assert all(tile.block_n * tile.block_k >= 8 * 32 * tile.num_warps for tile in tiles)
    mixed = mix_tile(top_k, inp, 4)
    assert mixed.block_m * mixed.block_n * mixed.block_k >= 8 * 32 * mixed.num_warps


def test_a_short_input_is_one_tile() -> None:
    assert skinny_tile(1, 64, 40, 4, 16).block_k == 64
    assert skinny_tile(4, 64, 8, 4, 16).block_k == 32
