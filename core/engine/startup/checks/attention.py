"""An attention kernel, on a small batch of every kind of row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.attention_kernel import (
    AttentionBatch,
    AttentionKernel,
    LayerCache,
    LogSumExpAttention,
    NativeAttention,
)
from engine.contracts.graph import Graph, KVSpec, TokenShare
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention, SharedAttention
from engine.kernels.checks.tensors import Bounded, random, tensor_problem, value_problem
from engine.kernels.storage import as_bits
from engine.kernels.torch.reference import paged_attention, paged_attention_lse
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.plugin_guard.calls import PluginError, contract_error, name_of, quote
from engine.step.tables import BlockShare

MORE_ROWS = ((1, 3), (1, 17), (1, 40), (1, 65))
"""Decodes enough that rows are not few."""
WIDEST = 4096
"""Tokens of a window or a chunk up to which a row is longer than it."""
TOLERANCE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.02}
"""Accepted error, as a share of the largest output, by compute dtype: a wrong mask, scale or row costs more."""


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Where a kernel is tried."""

    kernel: AttentionKernel
    kv_format: KVFormat
    dtype: str
    device: str
    block_size: int
    max_len: int
    max_requests: int
    """A kernel may have set aside memory for so many tokens of a row, and rows of a batch."""

    def __call__(self, graph: Graph) -> None:
        """Every kind of attention in the model. Raises :class:`~engine.plugin_guard.calls.PluginError`."""
        ops = {node.op for node in graph.nodes if isinstance(node.op, Attention | SharedAttention)}
        for one in ops:
            op = one if isinstance(one, Attention) else one.attention
            label: object = self.kernel.label(op, self.dtype, self.kv_format)
            if not isinstance(label, str):
                raise contract_error(self.kernel, "label", f"returned {quote(label)}, expected a text")
            if op.soft_cap is not None and not self.kernel.capabilities.soft_cap:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its scores are capped (soft_cap)")
            if op.value_dim is not None and not self.kernel.capabilities.latent:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its attention is latent")
            if op.sinks and not self.kernel.capabilities.sinks:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its softmax has sinks")
            rows = [row for row in self._rows(op) if row[1] <= self.max_len]
            for first in range(0, len(rows), self.max_requests):
                some = tuple(rows[first : first + self.max_requests])
                if isinstance(one, Attention):
                    self._try(op, some)
                else:
                    self._try_shared(op, some, len(one.shares), one.index)

    def _rows(self, op: Attention) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each row to try."""
        size, long = self.block_size, (1, min(300, self.max_len))
        # Decodes across a block's border, drafts, a whole prompt, a chunk behind what is cached, a long context.
        rows: tuple[tuple[int, int], ...] = ((1, size + 1), (3, size), (7, 7), (20, size + 25), long, *MORE_ROWS)
        if op.window is not None and op.window <= WIDEST:
            rows = (*rows, (2, op.window + 3))
        if op.chunk is not None and op.chunk <= WIDEST:  # drafts across a border, and what begins a chunk
            rows = (*rows, (3, op.chunk + 2), (1, op.chunk + 1))
        return rows

    def _try(self, op: Attention, rows: tuple[tuple[int, int], ...]) -> None:
        size = self.block_size
        batch, slots = _batch(rows, size, self.device)
        # Queries lie among keys and values, as the core has them.
        heads = op.num_heads + 2 * op.num_kv_heads
        compute, tokens = getattr(torch, self.dtype), sum(q_len for q_len, _ in rows)
        fused = random((tokens, heads, op.head_dim), compute, torch.device(self.device), 3)
        q, prepared = fused[:, : op.num_heads], self.kernel.prepare(batch)
        more = () if not op.sinks else (torch.linspace(-2.0, 2.0, op.num_heads, device=q.device),)
        for layer in range(2):  # which share what was prepared
            cache = self._cache(op, slots, layer)
            stored = cache.k.clone(), cache.v.clone()
            want = paged_attention(batch, op, q, cache, *more)
            forward: Callable[..., Tensor] = self.kernel.forward
            got = forward(prepared, op, q, cache, *more)
            wrong = tensor_problem(got, want.shape, compute, q.device) or value_problem(got, want, self._tolerance)
            if not wrong and not all(map(_same, stored, (cache.k, cache.v))):
                wrong = "changed the cache, which it may only read"
            if wrong:
                raise contract_error(self.kernel, "forward", wrong)
        if isinstance(self.kernel, NativeAttention) and q.device.type == "cpu":
            self._try_native(self.kernel, op, q, cache, batch, want, more)

    def _try_shared(self, op: Attention, rows: tuple[tuple[int, int], ...], ranks: int, index: int) -> None:
        """Attention to the tokens that one of several ranks has: which those are does not matter."""
        share = BlockShare.of(TokenShare(ranks, index), self.block_size)
        here = [(q_len, int(share.length(torch.tensor(kv_len)))) for q_len, kv_len in rows]
        ends = torch.tensor([kv_len - q_len + j + 1 for q_len, kv_len in rows for j in range(q_len)])
        batch, slots = _batch(tuple(here), share.size, self.device)
        batch = replace(batch, key_ends=share.length(ends).to(batch.kv_lens_device))
        compute, tokens = getattr(torch, self.dtype), len(ends)
        q = random((tokens, op.num_heads, op.head_dim), compute, torch.device(self.device), 3)
        kernel, prepared = self.kernel, self.kernel.prepare(batch)
        assert isinstance(kernel, LogSumExpAttention), "negotiation asks for it"
        cache = self._cache(op, slots or [0], 0, share.size)
        want, want_lse = paged_attention_lse(batch, op, q, cache)
        made: object = kernel.forward_lse(prepared, op, q, cache)
        if not isinstance(made, tuple) or len(made) != 2:
            raise contract_error(
                kernel, "forward_lse", f"returned {quote(made)}, expected the output and its log-sum-exp"
            )
        out, lse = made
        wrong = tensor_problem(out, want.shape, compute, q.device)
        wrong = wrong or tensor_problem(lse, want_lse.shape, torch.float32, q.device)
        none = want_lse == float("-inf")
        if not wrong and not torch.equal(lse == float("-inf"), none):
            wrong = "returned a log-sum-exp that is not -inf where a query sees no key, or is where it sees one"
        seen = (~none).repeat_interleave(op.out_dim, dim=1)
        if not wrong:
            wrong = value_problem(torch.where(seen, out, 0), torch.where(seen, want, 0), self._tolerance)
        if not wrong:
            wrong = value_problem(lse[~none], want_lse[~none], self._tolerance)
        if wrong:
            raise contract_error(kernel, "forward_lse", wrong)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def _try_native(
        self,
        kernel: NativeAttention,
        op: Attention,
        q: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        want: Tensor,
        more: tuple[Tensor, ...],
    ) -> None:
        memory = Bounded(want.shape, q.dtype)
        prepared = self.kernel.prepare(batch)  # lives until the call is made: it is pointed at
        call = kernel.call(prepared, op, q, cache, memory.inner, *more)
        if call is None:
            return
        call()
        del prepared
        wrong = memory.problem() or value_problem(memory.inner, want, self._tolerance)
        if wrong:
            raise contract_error(kernel, "call", wrong)

    def _cache(self, op: Attention, slots: list[int], layer: int, block_size: int | None = None) -> LayerCache:
        block_size = block_size or self.block_size
        blocks, one = (
            1 + max(slots) // block_size,
            cache_groups([KVSpec(op.num_kv_heads, op.head_dim, value_dim=op.value_dim)]),
        )
        kv = KVCache(one, self.kv_format, [blocks], block_size, self.dtype, self.device)
        heads, dtype, device = op.num_kv_heads, getattr(torch, self.dtype), torch.device(self.device)
        for_keys, for_values = (torch.linspace(low, low + 0.01, heads) for low in (0.02, 0.03))
        kv.set_scales(0, for_keys, for_values)
        k, v = (
            random((len(slots), heads, op.head_dim), dtype, device, seed) for seed in (10 * layer + 1, 10 * layer + 2)
        )
        kv.write(0, torch.tensor(slots, device=device), k, v if op.value_dim is None else None)
        return kv.layers[0]


def _same(before: Tensor, after: Tensor) -> bool:
    return torch.equal(as_bits(before), as_bits(after))


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
