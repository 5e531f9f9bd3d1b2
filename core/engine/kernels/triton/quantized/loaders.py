"""From a quantized weight to how kernels read it."""

from __future__ import annotations

from typing import Any

import torch

from engine.contracts.quantizer import QuantizedWeight, TileLoader, WordLoader
from engine.kernels.quantized import to_e2m1
from engine.kernels.storage import as_bits
from engine.kernels.triton.fragments import TILE
from engine.kernels.triton.narrow_types import e2m1_pairs, e4m3_pairs, int4_pairs, int8_pairs
from engine.kernels.triton.quantized import tiles
from engine.kernels.triton.quantized.layout import (
    are_powers,
    exponents,
    narrowest,
    packed_int4,
    packed_nibbles,
    tiles_hold_groups,
)


def why_unreadable(weight: QuantizedWeight) -> str | None:
    """What kernels cannot read about a weight; ``None``: they can."""
    if not tiles_hold_groups(weight.scale.shape[1], weight.group_size):
        return f"groups of {weight.group_size}, not a power of two"
    if weight.codes.is_floating_point() and weight.codes.dtype != torch.float8_e4m3fn:
        return f"{str(weight.codes.dtype).removeprefix('torch.')} weights"
    if weight.float_zeros:
        return "zero points that are no codes"
    if weight.e2m1 and not are_powers(2.0 * weight.scale):
        return "numbers of 4 bits with scales that are no powers of two"
    return None


def tile_loader(weight: QuantizedWeight) -> TileLoader:
    """Reads the columns as they are stored: a weight with an ``order`` multiplies inputs in that order.

    One scale per channel and no zeros: the scale multiplies sums. Else scales, and zeros, multiply tiles.
    """
    if weight.e2m1:
        return _e2m1_loader(weight)
    codes = packed_int4(weight.codes) if weight.bits == 4 else as_bits(weight.codes.contiguous())
    if weight.per_channel and weight.zero is None:
        load, unpack = _plain_functions(weight)
        scale = weight.scale.flatten().contiguous()
        return TileLoader(load, codes, channel_scale=scale, bias=weight.bias, unpack_tile=unpack, words=_words(weight))
    load, unpack = _grouped_functions(weight)
    return TileLoader(
        load,
        codes,
        scale=narrowest(weight.scale.contiguous()),
        zero=None if weight.zero is None else weight.zero.contiguous(),
        bias=weight.bias,
        group_size=_tile_group(weight),
        unpack_tile=unpack,
        tile_scale=tiles.group_scale,
        words=_words(weight),
    )


def _e2m1_loader(weight: QuantizedWeight) -> TileLoader:
    """Scales are read as their exponents, also a single one of a channel."""
    has_words = weight.group_size == 32 and weight.in_features % TILE == 0
    return TileLoader(
        tiles.load_int4_groups,
        packed_nibbles(to_e2m1(weight.codes), filling=0),
        scale=exponents(2.0 * weight.scale),
        bias=weight.bias,
        group_size=_tile_group(weight),
        unpack_tile=tiles.unpack_e2m1_groups,
        tile_scale=tiles.exponent_scale,
        words=WordLoader(tiles.nibble_words, e2m1_pairs, 4) if has_words else None,
    )


def _tile_group(weight: QuantizedWeight) -> int:
    """A tile may not straddle groups; of a single one any power of two that holds it all will do."""
    return 1 << (weight.in_features - 1).bit_length() if weight.per_channel else weight.group_size


def _plain_functions(weight: QuantizedWeight) -> tuple[Any, Any]:
    if weight.bits == 4:
        return tiles.load_int4, tiles.unpack_int4
    return tiles.load_int8, tiles.unpack_e4m3 if weight.codes.is_floating_point() else tiles.unpack_int8


def _grouped_functions(weight: QuantizedWeight) -> tuple[Any, Any]:
    if weight.bits == 4:
        return tiles.load_int4_groups, tiles.unpack_int4_groups if weight.zero is None else tiles.unpack_int4_zeros
    if weight.codes.is_floating_point():
        return tiles.load_int8_groups, tiles.unpack_e4m3_groups
    return tiles.load_int8_groups, tiles.unpack_int8_groups if weight.zero is None else tiles.unpack_int8_zeros


def _words(weight: QuantizedWeight) -> WordLoader | None:
    """Where a tile has one scale of each channel."""
    if weight.in_features % TILE or not (weight.per_channel or weight.group_size % TILE == 0):
        return None
    if weight.bits == 4:
        return WordLoader(tiles.nibble_words, int4_pairs, 4)
    if weight.zero is not None:
        return None  # codes less their zeros would take instructions of their own
    return WordLoader(tiles.byte_words, e4m3_pairs if weight.codes.is_floating_point() else int8_pairs, 8)
