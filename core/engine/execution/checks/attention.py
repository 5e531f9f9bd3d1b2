"""An attention kernel, on a small batch of every kind of row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.border.calls import PluginError, broken, name_of
from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, LayerCache, NativeAttention
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Attention, ModelOps
from engine.execution.checks.tensors import Bounded, random, tensor_problem, value_problem
from engine.execution.kv_cache import KVCache
from engine.execution.reference import paged_attention

WIDEST = 4096
"""Tokens of a window up to which a row is longer than it."""
TOLERANCE = 0.05
"""Accepted error, as a share of the largest output: what 8-bit keys cost; a wrong mask or scale costs more."""


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Where a kernel is tried."""

    kernel: AttentionKernel
    kv_format: KVFormat
    model: ModelFacts
    dtype: str
    device: str
    block_size: int

    def __call__(self, ops: ModelOps) -> None:
        """Every kind of attention in the model. Raises :class:`~engine.border.calls.PluginError`."""
        for op in {op for layer in ops.layers for op in layer if isinstance(op, Attention)}:
            if op.soft_cap is not None and not self.kernel.capabilities.soft_cap:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its scores are capped (soft_cap)")
            self._try(op)

    def _try(self, op: Attention) -> None:
        size = self.block_size
        # A decode across a block's border, drafts, a whole prompt, and a chunk behind what is cached.
        rows: tuple[tuple[int, int], ...] = ((1, size + 1), (3, size), (7, 7), (20, size + 25))
        if op.window is not None and op.window <= WIDEST:
            rows = (*rows, (2, op.window + 3))
        batch, slots = _batch(rows, size, self.device)
        cache = self._cache(rows, slots)
        compute = getattr(torch, self.dtype)
        q = random((sum(q_len for q_len, _ in rows), op.num_heads, op.head_dim), compute, torch.device(self.device), 3)
        want = paged_attention(batch, op, q, cache)
        prepared = self.kernel.prepare(batch)
        got = self.kernel.forward(prepared, op, q, cache)
        wrong = tensor_problem(got, want.shape, compute, q.device) or value_problem(got, want, TOLERANCE)
        if wrong:
            raise broken(self.kernel, "forward", wrong)
        if isinstance(self.kernel, NativeAttention) and q.device.type == "cpu":
            self._try_native(self.kernel, op, q, cache, batch, want)

    def _try_native(
        self,
        kernel: NativeAttention,
        op: Attention,
        q: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        want: Tensor,
    ) -> None:
        memory = Bounded(want.shape, q.dtype)
        prepared = self.kernel.prepare(batch)  # lives until the call is made: it is pointed at
        call = kernel.call(prepared, op, q, cache, memory.inner)
        if call is None:
            return
        call()
        del prepared
        wrong = memory.problem() or value_problem(memory.inner, want, TOLERANCE)
        if wrong:
            raise broken(kernel, "call", wrong)

    def _cache(self, rows: tuple[tuple[int, int], ...], slots: list[int]) -> LayerCache:
        one = replace(self.model, num_layers=1, layer_windows=(None,))
        blocks = 1 + max(slots) // self.block_size
        kv = KVCache(one, self.kv_format, blocks, self.block_size, self.dtype, self.device)
        heads, dtype, device = one.num_kv_heads, getattr(torch, self.dtype), torch.device(self.device)
        for_keys, for_values = (torch.linspace(low, low + 0.01, heads) for low in (0.02, 0.03))
        kv.set_scales(0, for_keys, for_values)
        k, v = (random((len(slots), heads, one.head_dim), dtype, device, seed) for seed in (1, 2))
        kv.write(0, torch.tensor(slots, device=device), k, v)
        return kv.layers[0]


def _batch(rows: tuple[tuple[int, int], ...], block_size: int, device: str) -> tuple[AttentionBatch, list[int]]:
    """The batch, and the slot of every key, row after row. Blocks of a row do not follow each other."""
    counts = [-(-kv_len // block_size) for _, kv_len in rows]
    order = list(range(sum(counts), 0, -1))
    tables, slots = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32), []
    for row, (count, (_, kv_len)) in enumerate(zip(counts, rows, strict=True)):
        blocks = [order.pop(len(order) // 2) for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[at // block_size] * block_size + at % block_size for at in range(kv_len)]
    q_lens, kv_lens = (tuple(lengths) for lengths in zip(*rows, strict=True))
    batch = AttentionBatch(
        q_lens=q_lens,
        kv_lens=tuple(kv_len + 1 for kv_len in kv_lens),  # bounds
        block_tables=tables.to(device),
        q_starts=torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_size=block_size,
    )
    return batch, slots
