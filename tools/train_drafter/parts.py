"""Layers that drafters are made of, over batches of whole sequences, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What every drafter has. Names as in ``config.json``."""

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def llama_config(self, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
        """``config.json`` of a model with layers like Llama's, in bfloat16; ``more``: what it has besides."""
        return {
            "architectures": [architecture],
            "model_type": model_type,
            **{field.name: getattr(self, field.name) for field in fields(Sizes)},
            **more,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
        }


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


class Attention(nn.Module):
    """What is around :func:`attend`: queries, keys and values of heads, queries and keys rotated, and the way back."""

    def __init__(self, sizes: Sizes, read: int, normed_heads: bool) -> None:
        """``read``: features of what is projected. ``normed_heads``: queries and keys pass a norm (as in Qwen3)."""
        super().__init__()
        self._dim, self._theta = sizes.head_dim, sizes.rope_theta
        size, kv_size = sizes.num_attention_heads * self._dim, sizes.num_key_value_heads * self._dim
        self.q_proj = nn.Linear(read, size, bias=False)
        self.k_proj = nn.Linear(read, kv_size, bias=False)
        self.v_proj = nn.Linear(read, kv_size, bias=False)
        self.o_proj = nn.Linear(size, sizes.hidden_size, bias=False)
        self.q_norm = RMSNorm(self._dim, sizes.rms_norm_eps) if normed_heads else nn.Identity()
        self.k_norm = RMSNorm(self._dim, sizes.rms_norm_eps) if normed_heads else nn.Identity()

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[rows, n, heads, head_dim]`` of ``x [rows, n, read]`` at positions ``[rows, n]``."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), self._tables(positions))

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[rows, n, kv_heads, head_dim]`` each."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), self._tables(positions))
        return keys, self._heads(self.v_proj(x))

    def output(self, found: Tensor) -> Tensor:
        """``[rows, n, hidden]`` of what the heads found, ``[rows, n, heads, head_dim]``."""
        return self.o_proj(found.flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._dim))

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotations(positions, self._dim, self._theta)


class Layer(nn.Module):
    """Norms, attention and MLP of a transformer layer, named as in Hugging Face's Llama. Where keys come from is up to
    the drafter."""

    def __init__(self, sizes: Sizes, *, beside: bool = False, normed_heads: bool = False) -> None:
        """``beside``: its attention reads two inputs side by side, the second normed by ``hidden_norm``."""
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps) if beside else nn.Identity()
        self.self_attn = Attention(sizes, (1 + beside) * hidden, normed_heads)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, sizes.intermediate_size)

    def output(self, x: Tensor, found: Tensor) -> Tensor:
        """What comes out, from the residual ``x [rows, n, hidden]`` that went in and what the heads found."""
        x = x + self.self_attn.output(found)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def shifted(x: Tensor, by: int) -> Tensor:
    """Column ``a`` of the result is column ``a + by`` of ``x [rows, A, ...]``; zeros come in at the end."""
    gone = min(by, x.shape[1])
    return torch.cat((x[:, gone:], torch.zeros_like(x[:, :gone])), dim=1)
