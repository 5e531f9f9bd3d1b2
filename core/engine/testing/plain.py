"""The plainest plugins of some slots, in torch alone: what a suite runs the plugins of another slot with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention, LinearSpec
from engine.contracts.quantizer import UNQUANTIZED, PlainWeight, StoredTensor, Weight, WeightFormat
from engine.kernels.torch.reference import paged_attention, paged_attention_lse

GROUP = 32


class PlainQuantizer:
    """Weights in the compute dtype."""

    lossless = True

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return UNQUANTIZED

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return None

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Weight:
        weight = torch.cat([part["weight"] for part in parts]) if len(parts) > 1 else parts[0]["weight"]
        biases = [part["bias"] if "bias" in part else torch.zeros(len(part["weight"])) for part in parts]
        return PlainWeight(weight, torch.cat([one.float() for one in biases]))


class RoundedQuantizer(PlainQuantizer):
    """Weights rounded to fewer bits."""

    lossless = False

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        """``rounded``: what becomes of a weight ``[out, in]``."""
        self._rounded = rounded

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Weight:
        rounded = [{**part, "weight": self._rounded(part["weight"].float())} for part in parts]
        return super().pack(spec, rounded, dtype, device)


def to_int8(weight: Tensor) -> Tensor:
    """With a scale for each output feature."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round() * scale


def to_fp8(weight: Tensor) -> Tensor:
    """Float8 (e4m3), with a scale for each output feature."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def to_int4(weight: Tensor) -> Tensor:
    """With a scale for :data:`GROUP` input features of each output feature."""
    groups = torch.split(weight, GROUP, dim=1)
    scales = [group.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 7 for group in groups]
    return torch.cat([(group / scale).round() * scale for group, scale in zip(groups, scales, strict=True)], dim=1)


class PlainAttention:
    """One row after another, by the definition."""

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        sinks=True,
        chunk=True,
        latent=True,
        max_verify_width=1 << 30,
        capturable=False,
    )

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        return "plain"

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        return paged_attention(prepared, op, q, cache, sinks)

    def forward_lse(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        return paged_attention_lse(prepared, op, q, cache)


class PlainAllocator:
    """Blocks in order of their release, and no cached prefixes."""

    caches_prefixes = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def start(self, groups: Sequence[KVGroup]) -> None:
        self._groups = tuple(groups)
        self._free = [list(range(1, group.num_blocks)) for group in groups]

    def match_prefix(self, prefix: Prefix) -> int:
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        return Lease(request_id, tuple([] for _ in self._groups), 0, 0)

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        whole = -(-num_tokens // self._block_size)
        held = (0,) * len(self._groups) if lease is None else map(len, lease.blocks)
        return tuple(max(0, whole - count) for count in held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if any(count > len(free) for count, free in zip(needed, self._free)):
            return False
        for count, ids, free in zip(needed, lease.blocks, self._free):
            ids += free[:count]
            del free[:count]
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        lease.num_committed = prefix.num_tokens
        for group, ids, free in zip(self._groups, lease.blocks, self._free):
            passed = min(len(ids), group.num_passed(prefix.num_tokens, self._block_size))
            free += filter(None, ids[:passed])
            ids[:passed] = [0] * passed

    def release(self, lease: Lease) -> None:
        for ids, free in zip(lease.blocks, self._free):
            free += filter(None, ids)
            ids.clear()

    def usage(self) -> tuple[BlockUsage, ...]:
        totals = (group.num_blocks - 1 for group in self._groups)
        return tuple(BlockUsage(total, len(free), 0, total - len(free)) for total, free in zip(totals, self._free))

    def reset_cache(self) -> None: ...
