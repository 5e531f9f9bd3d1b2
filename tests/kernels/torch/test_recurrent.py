"""Recurrent ops on a paged cache against their definition, token by token in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import StateSpec
from engine.contracts.ops import DeltaRule
from engine.kernels.torch.recurrent import Rows, _block_by_block, _Tokens
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.testing.attention_cases import PlainFormat

RULE = DeltaRule(2, 5, 4, 3, "rate", "bias")
LENGTHS = (1, 7, 8, 9, 40)


def inputs(count: int, generator: torch.Generator) -> _Tokens:
    """Keys and queries of length 1, strengths up to 1, and decays from none to all but everything."""
    heads, keys = RULE.num_heads, RULE.num_key_heads
    q, k = (F.normalize(torch.randn(count, keys, RULE.key_dim, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(count, heads, RULE.value_dim, generator=generator)
    strength = torch.rand(count, heads, generator=generator)
    return _Tokens(q, k, v, strength, -(torch.rand(count, heads, generator=generator) ** 6) * 30)


def expected(tokens: _Tokens) -> Tensor:
    groups = RULE.num_heads // RULE.num_key_heads
    state, made = torch.zeros(RULE.num_heads, RULE.key_dim, RULE.value_dim, dtype=torch.float64), []
    for i in range(len(tokens.q)):
        q, k = (each[i].double().repeat_interleave(groups, dim=0)[:, :, None] for each in (tokens.q, tokens.k))
        state = state * tokens.decay[i].double().exp()[:, None, None]
        missing = tokens.v[i].double()[:, None] - (state * k).sum(dim=1, keepdim=True)
        state = state + k * tokens.strength[i].double()[:, None, None] * missing
        made.append((state * q).sum(dim=1).flatten())
    return torch.stack(made).float()


class Paged:
    """Sequences whose blocks are scattered over a cache that begins as NaN."""

    def __init__(self, block_size: int) -> None:
        spec = StateSpec(2 * 5 + 4 * 3 + 4, 4 * 5 * 3)
        kv = KVCache(cache_groups([spec]), PlainFormat(), [64], block_size, "float32", "cpu")
        self.cache, self.size = kv.states[0], block_size
        self.cache.tokens.fill_(float("nan"))
        self.cache.states.fill_(float("nan"))
        free = random.Random(4).sample(range(1, 64), 63)
        self.tables = [[free.pop() for _ in range(40 // block_size + 2)] for _ in LENGTHS]

    def step(self, rows: list[tuple[int, int, _Tokens]]) -> list[Tensor]:
        """Of sequences, where their tokens begin, and these."""
        counts = [len(tokens.q) for _, _, tokens in rows]
        ends = [start + count for (_, start, _), count in zip(rows, counts, strict=True)]
        batch = AttentionBatch(
            tuple(counts), tuple(ends), torch.tensor([self.tables[row] for row, _, _ in rows]).int(),
            torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(ends).int(), self.size,
        )  # fmt: skip
        names = ("q", "k", "v", "strength", "decay")
        together = _Tokens(*(torch.cat([getattr(tokens, name) for _, _, tokens in rows]) for name in names))
        made = _block_by_block(RULE, Rows.of(batch), together, self.cache.tokens, self.cache.states)
        return list(made.split(counts))


def part(tokens: _Tokens, start: int, stop: int) -> _Tokens:
    return _Tokens(*(getattr(tokens, name)[start:stop] for name in ("q", "k", "v", "strength", "decay")))


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("seed", range(6))
def test_any_steps_give_what_the_definition_gives(block_size: int, seed: int) -> None:
    """Sequences of several lengths together, in steps of any size; half of the steps also compute drafts, which are
    rejected: the next step computes their positions again."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    paged, sequences = Paged(block_size), [inputs(length, generator) for length in LENGTHS]
    done, found = [0] * len(LENGTHS), [torch.empty(0, 12)] * len(LENGTHS)
    while left := [row for row, length in enumerate(LENGTHS) if done[row] < length]:
        chosen, counts = rng.sample(left, rng.randint(1, len(left))), {}
        rows = []
        for row in chosen:
            counts[row] = min(rng.choice((1, 2, 5, 17)), LENGTHS[row] - done[row])
            real = part(sequences[row], done[row], done[row] + counts[row])
            drafts = inputs(rng.choice((0, 3)) if done[row] + counts[row] <= LENGTHS[row] - 3 else 0, generator)
            names = ("q", "k", "v", "strength", "decay")
            both = _Tokens(*(torch.cat((getattr(real, name), getattr(drafts, name))) for name in names))
            rows.append((row, done[row], both))
        for row, made in zip(chosen, paged.step(rows), strict=True):
            found[row] = torch.cat((found[row], made[: counts[row]]))
            done[row] += counts[row]
    for row, tokens in enumerate(sequences):
        torch.testing.assert_close(found[row], expected(tokens), atol=2e-5, rtol=1e-4)
