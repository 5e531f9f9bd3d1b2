"""A Llama in plain torch with a static KV cache: what one writes in an afternoon, and the yardstick for more.

The layer is a function of tensors alone, so that ``torch.compile`` makes one program of it that serves every layer, and
a whole step reads its position from the device, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.shapes import EPS, ROPE_THETA, Shape

WEIGHTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where a step's ``n`` tokens are, the same for all rows."""

    positions: Tensor
    """int64 ``[n]``"""
    cos: Tensor
    """``[n, head_dim]``"""
    sin: Tensor
    mask: Tensor
    """bool ``[n, max_len]``: what each may see."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of ``[..., n, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def layer(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, ffn_norm: Tensor, gate: Tensor, up: Tensor,
    down: Tensor, keys: Tensor, values: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
) -> Tensor:  # fmt: skip
    """``x [rows, n, hidden]``; ``keys``, ``values`` ``[rows, kv_heads, max_len, head_dim]``, written in place."""
    rows, n, hidden = x.shape
    _, kv_heads, max_len, head_dim = keys.shape
    h = F.rms_norm(x, (hidden,), norm, EPS)
    q = F.linear(h, wq).view(rows, n, -1, head_dim).transpose(1, 2)
    k = F.linear(h, wk).view(rows, n, kv_heads, head_dim).transpose(1, 2)
    v = F.linear(h, wv).view(rows, n, kv_heads, head_dim).transpose(1, 2)
    keys[:, :, positions] = rotated(k, cos, sin)
    values[:, :, positions] = v
    # The queries that share a key head follow one another, so that no key is copied for them.
    group = q.shape[1] // kv_heads
    packed = rotated(q, cos, sin).reshape(rows, kv_heads, group * n, head_dim)
    visible = mask.expand(group, n, max_len).reshape(group * n, max_len)
    seen = F.scaled_dot_product_attention(packed, keys, values, attn_mask=visible)
    seen = seen.view(rows, kv_heads * group, n, head_dim).transpose(1, 2).reshape(rows, n, -1)
    x = x + F.linear(seen, wo)
    h = F.rms_norm(x, (hidden,), ffn_norm, EPS)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


class PlainLlama:
    """Weights and a cache for ``rows`` sequences of the same length."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], rows: int, max_len: int) -> None:
        embed = weights["model.embed_tokens.weight"]
        self.embed, self.norm = embed, weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", embed)
        self.layers = [
            tuple(weights[f"model.layers.{i}.{name}.weight"] for name in WEIGHTS)
            for i in range(shape.num_hidden_layers)
        ]
        size = (rows, shape.num_key_value_heads, max_len, shape.head_dim)
        self.caches = [tuple(embed.new_empty(size).normal_() for _ in range(2)) for _ in self.layers]
        half = torch.arange(0, shape.head_dim, 2, device=embed.device, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(max_len, device=embed.device)[:, None] * ROPE_THETA**-half
        self.cos, self.sin = (f(angles).repeat(1, 2).to(embed.dtype) for f in (torch.cos, torch.sin))
        self.everywhere = torch.arange(max_len, device=embed.device)

    def __call__(self, tokens: Tensor, positions: Tensor, run: Callable[..., Tensor] = layer) -> Tensor:
        """Logits ``[rows, vocab]`` after the last of ``tokens`` ``[rows, n]`` at ``positions`` ``[n]``."""
        mask = self.everywhere[None, :] <= positions[:, None]
        metadata = Metadata(positions, self.cos[positions], self.sin[positions], mask)
        x = F.embedding(tokens, self.embed)
        for weights, (keys, values) in zip(self.layers, self.caches, strict=True):
            x = run(x, *weights, keys, values, metadata.positions, metadata.cos, metadata.sin, metadata.mask)
        return F.linear(F.rms_norm(x[:, -1], self.norm.shape, self.norm, EPS), self.head)

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """``count`` tokens after a prompt, for one row."""
        device = self.embed.device
        tokens, start, found = torch.tensor([prompt], device=device), 0, []
        for _ in range(count):
            positions = torch.arange(start, start + tokens.shape[1], device=device)
            start += tokens.shape[1]
            tokens = self(tokens, positions).argmax(dim=-1, keepdim=True)
            found.append(int(tokens))
        return tuple(found)
