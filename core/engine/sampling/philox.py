"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).

A number is a pure function of ``(seed, position, purpose, index)``. Nothing is advanced and nothing is shared, so
what one request draws depends neither on its neighbours nor on how work was batched.

The arithmetic is 32-bit unsigned, carried in int64 tensors: a product of two 32-bit words wraps modulo 2**64, which
keeps exactly the 64 bits wanted, on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 0
"""Purpose: Gumbel noise for the token at an output position."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_LOWEST = 2.0**-33
_HIGHEST = 1.0 - 2.0**-24
"""The largest float32 below 1."""

_CACHE_WORDS = 1 << 14
"""On a CPU, rows longer than this are made one by one: the intermediate words of one stay in the cache."""

GUMBEL_SPAN = math.log(-math.log1p(-_HIGHEST)) - math.log(-math.log1p(-_LOWEST)) + 1e-3
"""Largest possible gap between two draws of :func:`gumbel` (rounding included): a token whose logit is further than
this below another's can never win against it."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32. Words are int64 tensors in ``[0, 2**32)``; ``counter``'s of one shape."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1 = p1.bitwise_and_(_MASK)
        c3 = p0.bitwise_and_(_MASK)
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _words(seeds: Tensor, positions: Tensor, purpose: int, blocks: Tensor) -> tuple[Tensor, ...]:
    """The four 32-bit words of each block of the stream named by (seed, position, purpose)."""
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    shape = (blocks + positions).shape
    low, high = positions & _MASK, (positions >> 32) & _MASK
    purposes = torch.full_like(positions, purpose)
    counter = (blocks.expand(shape), purposes.expand(shape), low.expand(shape), high.expand(shape))
    return philox4x32(counter, key)


def _to_unit(words: Tensor) -> Tensor:
    """32-bit words to float32 in (0, 1), keeping full relative precision near 0."""
    return words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_HIGHEST)


def _to_gumbel(unit: Tensor) -> Tensor:
    # 1 - u is as uniform as u. Taking -log1p(-u) puts the fine end of the float grid at the large draws, which
    # are the ones that decide an argmax: no ties and no bias among the rare tokens of a big vocabulary.
    return unit.neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, purpose: int, n: int) -> Tensor:
    """float32 ``[R, n]`` in (0, 1). ``seeds``, ``positions``: int64 ``[R]``; ``purpose``: one of this module's."""
    if seeds.device.type == "cpu" and len(seeds) > 1 and n > _CACHE_WORDS:
        rows = [uniform(seeds[i : i + 1], positions[i : i + 1], purpose, n) for i in range(len(seeds))]
        return torch.cat(rows)
    blocks = torch.arange((n + 3) // 4, device=seeds.device)
    words = _words(seeds[:, None], positions[:, None], purpose, blocks[None, :])
    return _to_unit(torch.stack(words, dim=-1).flatten(1)[:, :n])


def gumbel(seeds: Tensor, positions: Tensor, purpose: int, n: int) -> Tensor:
    """Standard Gumbel noise, float32 ``[R, n]``; arguments as for :func:`uniform`."""
    return _to_gumbel(uniform(seeds, positions, purpose, n))


def gumbel_at(seeds: Tensor, positions: Tensor, purpose: int, index: Tensor) -> Tensor:
    """Single entries of :func:`gumbel`: ``out[i]`` is entry ``index[i]`` of the row of ``seeds[i], positions[i]``.

    All int64 ``[N]``; returns float32 ``[N]``.
    """
    words = torch.stack(_words(seeds, positions, purpose, index >> 2), dim=-1)
    return _to_gumbel(_to_unit(words.gather(-1, (index & 3)[:, None]).squeeze(-1)))


def signed64(seed: int) -> int:
    """A 64-bit seed of either signedness as the value an int64 tensor holds."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
