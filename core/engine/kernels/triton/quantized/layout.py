"""Quantized weights in the form in which GPU kernels read them.

8 bits: codes ``[out, in]`` as they are, which ``torch._int_mm`` and ``torch._scaled_mm`` read too; a tile of 128 inputs
is a whole cache line of every channel.

4 bits: tiles of :data:`SLAB` channels by :data:`TILE_INPUTS` inputs, 1 KB each, those of a slab one after another. A
program that computes sixteen neighbouring channels so reads one run of memory from its first byte to its last, 16 bytes
per thread. Inside a tile a channel's 64 bytes are contiguous; the order of their nibbles is that of
:func:`engine.kernels.triton.narrow_types.from_int4`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec

SLAB = 16
"""Output channels of a tile: what a program computes, or two programs of eight."""
TILE_INPUTS = 128


def packed_int4(codes: Tensor) -> Tensor:
    """int8 codes -8 .. 7 ``[out, in]`` as :func:`packed_nibbles`, filled up with code 0."""
    return packed_nibbles((codes + 8).to(torch.uint8), filling=8)


def packed_nibbles(codes: Tensor, filling: int) -> Tensor:
    """uint8 codes 0 .. 15 ``[out, in]`` -> uint8 ``[slabs, tiles, SLAB, TILE_INPUTS / 2]``."""
    out, inputs = codes.shape
    padded = F.pad(codes, (0, -inputs % TILE_INPUTS, 0, -out % SLAB), value=filling)
    codes = padded.view(padded.shape[0], -1, 2, 2, 2)  # code 4 a + 2 b + c of eight: half b of byte 2 c + a
    packed = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(2, 3)
    return packed.reshape(-1, SLAB, padded.shape[1] // TILE_INPUTS, TILE_INPUTS // 2).transpose(1, 2).contiguous()


def int4_bytes(out_features: int, in_features: int) -> int:
    """Bytes of :func:`packed_int4`."""
    slabs, tiles = -(-out_features // SLAB), -(-in_features // TILE_INPUTS)
    return slabs * tiles * SLAB * TILE_INPUTS // 2


def narrowest(scale: Tensor) -> Tensor:
    """float32 scales in 16 bits, where those hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scale.to(dtype)
        if torch.equal(narrow.float(), scale):
            return narrow
    return scale


def unpacked_int4(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of :func:`packed_int4`: int8 ``[out_features, in_features]``."""
    return unpacked_nibbles(packed, out_features, in_features).to(torch.int8) - 8


def unpacked_nibbles(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of :func:`packed_nibbles`: uint8 ``[out_features, in_features]``."""
    rows = packed.transpose(1, 2).reshape(packed.shape[0] * SLAB, -1, 2, 2).transpose(2, 3)
    nibbles = torch.stack([rows & 15, rows >> 4], dim=3).flatten(1)
    return nibbles[:out_features, :in_features]


def exponents(scale: Tensor) -> Tensor:
    """float32 powers of two as the bits of e8m0, uint8."""
    return scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def are_powers(scale: Tensor) -> bool:
    """Whether :func:`exponents` loses nothing."""
    return torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)


def tiles_hold_groups(groups: int, group_size: int) -> bool:
    """Whether kernels read weights with so many groups of inputs: none of theirs may straddle two tiles."""
    return groups == 1 or group_size & (group_size - 1) == 0


def gpu_bytes(
    spec: LinearSpec, bits: int, group_size: int, has_zeros: bool, has_bias: bool, scale_bytes: int = 4
) -> int:
    """Bytes of what ``pack_gpu`` keeps, at most: scales may take half of theirs."""
    out, groups = spec.out_features, -(-spec.in_features // group_size)
    # What kernels cannot read keeps a byte for each code.
    in_tiles = bits == 4 and tiles_hold_groups(groups, group_size)
    codes = int4_bytes(out, spec.in_features) if in_tiles else out * spec.in_features
    return codes + out * (groups * (has_zeros + scale_bytes) + has_bias * torch.float32.itemsize)
