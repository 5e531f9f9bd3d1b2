"""What ranks attended to is merged to what one would have attended to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.torch.shared_attention import merged

TOKENS, HEADS, DIM = 3, 2, 4


def attended(scores: Tensor, values: Tensor) -> Tensor:
    """``scores [tokens, heads, keys]``, ``values [keys, dim]`` -> what a rank sends."""
    out = torch.einsum("thk,kd->thd", scores.softmax(-1), values)
    return torch.cat((out, scores.logsumexp(-1, keepdim=True)), dim=-1)


def keys(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(TOKENS, HEADS, count, generator=generator) * 4, torch.randn(count, DIM, generator=generator)


@pytest.mark.parametrize("counts", [(5, 7), (1, 1, 9), (4, 3, 2, 1)])
def test_parts_merge_to_the_whole(counts: tuple[int, ...]) -> None:
    scores, values = keys(sum(counts))
    parts = [attended(*part) for part in zip(scores.split(counts, -1), values.split(counts), strict=True)]
    assert torch.allclose(merged(parts), attended(scores, values)[..., :-1], atol=1e-6)


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    scores, values = keys(6)
    for shift in (-3000.0, 3000.0):
        parts = [attended(scores[..., :3] + shift, values[:3]), attended(scores[..., 3:] + shift, values[3:])]
        assert torch.allclose(merged(parts), attended(scores, values)[..., :-1], atol=1e-3)


def test_a_rank_without_keys_weighs_nothing_whatever_it_sends() -> None:
    scores, values = keys(5)
    part, nothing = attended(scores, values), torch.full((TOKENS, HEADS, DIM + 1), float("nan"))
    nothing[..., -1] = float("-inf")
    assert torch.allclose(merged([nothing, part, nothing]), part[..., :-1], atol=1e-6)


def test_sinks_are_counted_once() -> None:
    scores, values = keys(8)
    sinks = torch.tensor([0.5, 6.0])
    with_sinks = torch.cat((scores, sinks[None, :, None].expand(TOKENS, -1, 1)), dim=-1).softmax(-1)[..., :-1]
    want = torch.einsum("thk,kd->thd", with_sinks, values)
    parts = [attended(scores[..., :2], values[:2]), attended(scores[..., 2:], values[2:])]
    assert torch.allclose(merged(parts, sinks), want, atol=1e-6)
