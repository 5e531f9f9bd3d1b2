"""Layers that drafters are made of, over batches of whole sequences, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[..., 1, head_dim]`` of positions ``[...]`` (RoFormer, arXiv:2104.09864), in halves."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``x [..., heads, head_dim]``"""
    first, second = x.chunk(2, dim=-1)
    return x * tables[0] + torch.cat((-second, first), dim=-1) * tables[1]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    own: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Attention of queries ``[rows, A, heads, dim]`` on keys that all share, ``[rows, T, kv_heads, dim]``, where
    ``visible [rows, A, T]``, and on the pairs of ``own``, ``[rows, A, kv_heads, dim]`` each: query ``a`` sees entry
    ``a`` of every pair. Returns ``[rows, A, heads, dim]``."""
    rows, columns, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, columns, kv_heads, heads // kv_heads, dim) * dim**-0.5
    shared = torch.einsum("bakgd,btkd->bakgt", grouped, keys)
    shared = shared.masked_fill(~visible[:, :, None, None, :], float("-inf"))
    single = [(grouped * k[:, :, :, None, :]).sum(dim=-1, keepdim=True) for k, _ in own]
    weights = torch.cat([shared, *single], dim=-1).softmax(dim=-1)
    out = torch.einsum("bakgt,btkd->bakgd", weights[..., : keys.shape[1]], values)
    for i, (_, v) in enumerate(own):
        out = out + weights[..., keys.shape[1] + i, None] * v[:, :, :, None, :]
    return out.reshape(rows, columns, heads, dim)


def shifted(x: Tensor, by: int) -> Tensor:
    """Column ``a`` of the result is column ``a + by`` of ``x [rows, A, ...]``; zeros come in at the end."""
    gone = min(by, x.shape[1])
    return torch.cat((x[:, gone:], torch.zeros_like(x[:, :gone])), dim=1)
