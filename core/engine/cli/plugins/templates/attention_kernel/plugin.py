"""Attention kernel ``mine``: each row's keys and values are gathered, and torch does the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MineKernelConfig(SlotConfig):
    """The keys ``attention_kernel.<field>``: add fields with a type, a default and a line on what they do."""


@hookimpl
def engine_attention_kernel() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.attention_kernel.plugin:MineKernel",
            config=MineKernelConfig,
            doc="Gathers keys and values, then plain torch.",
        )
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step."""

    start: int
    """Its first query among those of the step."""
    q_len: int
    kv_len: int
    slots: Tensor
    """int64 ``[kv_len]``: where its tokens are in the cache, as ``block * block_size + offset``."""


class MineKernel:
    """The core has written the new keys and values already; a kernel reads."""

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        sinks=True,
        chunk=True,
        max_verify_width=1 << 30,
        capturable=False,
    )
    """What the kernel can do: a plan that wants more is refused, and the suite has no cases of it."""

    def __init__(self, config: MineKernelConfig, context: BuildContext) -> None:
        pass

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        """What computes ``op``, for ``/engine/plan``."""
        return "torch, row by row"

    def prepare(self, batch: AttentionBatch) -> tuple[Row, ...]:
        """What all layers share, once per step: :meth:`forward` gets it."""
        return tuple(_rows(batch))

    def forward(
        self, prepared: tuple[Row, ...], op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        """``q``: ``[num_tokens, num_heads, head_dim]`` -> ``[num_tokens, num_heads * head_dim]`` in its dtype."""
        out = q.new_empty(q.shape[0], op.num_heads * op.head_dim)
        for row in prepared:
            queries = slice(row.start, row.start + row.q_len)
            keys = _read(cache.k, cache.k_scale, row.slots, cache.format, q.dtype)
            values = _read(cache.v, cache.v_scale, row.slots, cache.format, q.dtype)
            out[queries] = _attend(op, q[queries], keys, values, sinks)
        return out


def _rows(batch: AttentionBatch) -> Iterator[Row]:
    import torch  # here, or listing the plugin would load it

    # While drafts are verified, the host has bounds of the lengths. To ask the device waits for it, once per step.
    kv_lens = batch.kv_lens_device.tolist()
    start = 0
    for index, (q_len, kv_len) in enumerate(zip(batch.q_lens, kv_lens)):
        if q_len:  # a row without queries is padding
            position = torch.arange(kv_len, device=batch.block_tables.device)
            block = batch.block_tables[index].long()[position // batch.block_size]
            yield Row(start, q_len, kv_len, block * batch.block_size + position % batch.block_size)
        start += q_len


def _read(cache: Tensor, scale: Tensor | None, slots: Tensor, kv_format: KVFormat, dtype: Any) -> Tensor:
    """``[kv_len, num_kv_heads, head_dim]`` in the compute dtype: what the format stores, unpacked."""
    if scale is not None and kv_format.scale == "per_token_head":
        scale = scale.flatten(0, 1)[slots]
    return kv_format.unpack(cache.flatten(0, 1)[slots], scale, dtype)


def _attend(op: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """One row: query ``j`` sees keys up to ``kv_len - q_len + j``, from the first of its window or chunk on.
    ``sinks``: one more logit for each head, of a key without a value."""
    import torch

    group = op.num_heads // op.num_kv_heads
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * op.scale
    if op.soft_cap is not None:
        scores = op.soft_cap * torch.tanh(scores / op.soft_cap)
    key = torch.arange(len(k), device=q.device)
    query = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    hidden = (key > query) | (key < op.first_key(query))
    # What a window or chunk has passed may be another request's memory: nothing of it may show, not even NaN.
    v = v.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v).flatten(1).to(q.dtype)
