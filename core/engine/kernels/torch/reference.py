"""Every op in plain torch: slow, obviously right, and what faster paths are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, LayerCache
from engine.contracts.ops import Attention, Gated

NOT_FINITE = -1
"""The token of a row whose logits hold NaN or +inf, or nothing but -inf."""


def most_likely(logits: Tensor) -> Tensor:
    """The greedy token of each row of float32 ``[N, V]``: int64 ``[N]``, the lowest id among equals,
    :data:`NOT_FINITE` where logits are broken."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


def activated(x: Tensor, act: str) -> Tensor:
    """See :data:`engine.contracts.ops.Act`; new memory."""
    match act:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square_()
    raise ValueError(f"activation {act!r}")


def gated(gate: Tensor, up: Tensor, op: Gated) -> Tensor:
    """See :class:`engine.contracts.ops.Gated`; new memory."""
    if op.limit is not None:
        gate, up = gate.clamp(max=op.limit), up.clamp(-op.limit, op.limit)
    made = activated(gate, op.act) if op.alpha == 1.0 else gate * torch.sigmoid(op.alpha * gate)
    return made.mul_(up + op.offset if op.offset else up)


def gated_activation(gate_up: Tensor, act: str) -> Tensor:
    """``act(gate) * up`` of ``[num_tokens, 2 * size]``, gate first -> ``[num_tokens, size]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate, act).mul_(up)


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(scores / cap)``; unchanged without a cap."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of ``[..., heads, queries, keys]``; ``sinks``: ``[heads]``, one more logit each."""
    if sinks is None:
        return scores.softmax(dim=-1)
    more = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, more), dim=-1).softmax(dim=-1)[..., :-1]


def gather_sequence(cache: Tensor, scale: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys or values of some slots ``[n]`` -> ``[n, kv_heads, head_dim]`` as stored, and their scales.

    ``cache``: ``[num_blocks, block_size, kv_heads, head_dim]``; ``scale``: ``None``, ``[kv_heads]`` or
    ``[num_blocks, block_size, kv_heads]``.
    """
    picked = cache.flatten(0, 1).index_select(0, slots)
    if scale is None or scale.dim() == 1:
        return picked, scale
    return picked, scale.flatten(0, 1).index_select(0, slots)


def paged_attention(
    batch: AttentionBatch,
    op: Attention,
    q: Tensor,
    cache: LayerCache,
    sinks: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Attention of each sequence by itself, in float32. Shapes as in ``AttentionKernel.forward``. ``exact``: in
    float64, which is not rounded."""
    outputs, start, kind = [], 0, torch.float64 if exact else torch.float32
    for row, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens_device.tolist(), strict=True)):
        keys, values = (x.to(kind) for x in _sequence(batch, cache, row, kv_len))
        outputs.append(_attend(op, q[start : start + q_len].to(kind), keys, values, sinks))
        start += q_len
    found = torch.cat(outputs).flatten(1)
    return found if exact else found.to(q.dtype)


def paged_attention_lse(
    batch: AttentionBatch, op: Attention, q: Tensor, cache: LayerCache, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """As :meth:`engine.contracts.attention_kernel.LogSumExpAttention.forward_lse`, each query by itself. ``exact``: in
    float64, which is not rounded."""
    assert batch.key_ends is not None
    kind, group = torch.float64 if exact else torch.float32, op.num_heads // op.num_kv_heads
    out = torch.zeros(q.shape[0], op.num_heads, op.out_dim, dtype=kind, device=q.device)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=kind, device=q.device)
    rows = [row for row, q_len in enumerate(batch.q_lens) for _ in range(q_len)]
    for query, (row, end) in enumerate(zip(rows, batch.key_ends.tolist(), strict=True)):
        if not end:
            continue
        keys, values = (x.to(kind).repeat_interleave(group, dim=1) for x in _sequence(batch, cache, row, end))
        scores = soft_capped(torch.einsum("hd,khd->hk", q[query].to(kind), keys) * op.scale, op.soft_cap)
        lse[query] = scores.logsumexp(dim=-1)
        out[query] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values)
    return (out.flatten(1) if exact else out.flatten(1).to(q.dtype)), lse


def _sequence(batch: AttentionBatch, cache: LayerCache, row: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row, float32 ``[kv_len, kv_heads, dim]``."""
    positions = torch.arange(kv_len, device=cache.k.device)
    blocks = batch.block_tables[row, positions // batch.block_size].long()
    slots = blocks * batch.block_size + positions % batch.block_size
    keys = cache.format.unpack(*gather_sequence(cache.k, cache.k_scale, slots), torch.float32)
    return keys, cache.format.unpack(*gather_sequence(cache.v, cache.v_scale, slots), torch.float32)


def _attend(op: Attention, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """``q [q_len, heads, dim]`` on ``keys``, ``values [kv_len, kv_heads, dim]``, all of one dtype."""
    q_len, kv_len = q.shape[0], keys.shape[0]
    group = op.num_heads // op.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = soft_capped(torch.einsum("qhd,khd->hqk", q, keys) * op.scale, op.soft_cap)
    query_pos = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    key_pos = torch.arange(kv_len, device=q.device)[None, :]
    visible = (key_pos <= query_pos) & (key_pos >= op.first_key(query_pos))
    weights = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), sinks)
    return torch.einsum("hqk,khd->qhd", weights, values)
