"""Attention that can be captured on a CPU: every query on all keys of its row's block table, the unseen ones masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention


@dataclass(frozen=True, slots=True)
class Prepared:
    batch: AttentionBatch
    rows: Tensor
    """int64 ``[num_tokens]``: the row of each query."""
    ahead: Tensor
    """int64 ``[num_tokens]``: queries of its row after each."""


class DenseAttention:
    """Attention over a cache that stores keys and values as they are."""

    capabilities = AttentionCapabilities(None, ("float32",), True, False, 64, capturable=True, chunk=True)

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        return "DenseAttention"

    def prepare(self, batch: AttentionBatch) -> Prepared:
        rows = [row for row, count in enumerate(batch.q_lens) for _ in range(count)]
        ahead = [count - 1 - j for count in batch.q_lens for j in range(count)]
        return Prepared(batch, torch.tensor(rows), torch.tensor(ahead))

    def forward(self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        batch, group = prepared.batch, op.num_heads // op.num_kv_heads
        keys, values = (part[batch.block_tables.long()].flatten(1, 2)[prepared.rows] for part in (cache.k, cache.v))
        end = batch.kv_lens_device.long()[prepared.rows] - prepared.ahead
        key = torch.arange(keys.shape[1])[None]
        seen = key < end[:, None]  # [T, S]
        seen &= key >= op.first_key(end - 1)[:, None]
        keys = keys.masked_fill(~seen[:, :, None, None], 0.0)
        grouped = q.reshape(len(q), op.num_kv_heads, group, op.head_dim)
        scores = torch.einsum("tkgd,tskd->tkgs", grouped, keys) * op.scale
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
        values = values.masked_fill(~seen[:, :, None, None], 0.0)
        return torch.einsum("tkgs,tskd->tkgd", weights, values).reshape(len(q), -1)
