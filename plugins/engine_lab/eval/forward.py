"""A loaded plan that predicts every token of a window, as the engine would compute it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.attention_kernel import AttentionBatch
from engine.kernels.context import ForwardBatch
from engine.kv.cache import KVCache
from engine.kv.groups import one_group
from engine.startup.checks import check_attention
from engine.startup.rank import load_plan

HEAD_ROWS = 256
"""Rows of logits at a time: ``[rows, vocab]`` in float32, for two plans, is what scoring takes."""


class LoadedPlan:
    """Weights, kernels and KV cache of one plan. Keys and values go through the paged cache, in the plan's format."""

    def __init__(self, plan: EnginePlan, bound: BoundEngine, context: int, chunk: int, label: str = "the plan") -> None:
        """``context``: most tokens of a window; ``chunk``: most tokens of a forward pass; ``label``: for messages."""
        check_attention(plan, bound)
        self.label = label
        self.model = load_plan(plan, bound)
        self._device = plan.device.kind
        self._block_size = bound.context.block_size
        self._chunk = chunk
        blocks = -(-context // self._block_size)
        caches = one_group(self.model.graph.caches)
        self._kv = KVCache(caches, bound.kv_format, [blocks + 1], self._block_size, plan.dtype, self._device)
        for layer, scales in enumerate(self.model.kv_scales):
            if scales is not None:
                self._kv.set_scales(layer, *scales)
        # Block 0 belongs to nobody, as in the engine.
        self._blocks = torch.arange(1, blocks + 1, dtype=torch.int32, device=self._device)[None]

    def hidden(self, tokens: tuple[int, ...]) -> Tensor:
        """The residual stream after the last layer, ``[len(tokens), hidden_size]``."""
        starts = range(0, len(tokens), self._chunk)
        return torch.cat([self._step(tokens, start) for start in starts])

    def _step(self, tokens: tuple[int, ...], start: int) -> Tensor:
        end = min(start + self._chunk, len(tokens))
        positions = torch.arange(start, end, device=self._device)
        attention = AttentionBatch(
            q_lens=(end - start,),
            kv_lens=(end,),
            block_tables=self._blocks,
            q_starts=torch.tensor([0, end - start], dtype=torch.int32, device=self._device),
            kv_lens_device=torch.tensor([end], dtype=torch.int32, device=self._device),
            block_size=self._block_size,
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens[start:end], device=self._device),
            positions=positions,
            slot_mappings=(positions + self._block_size,),
            attention=(attention,),
            row_ids=torch.zeros_like(positions),
        )
        hidden, _ = self.model.forward(batch, self._kv)
        return hidden

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Float32 ``[at most HEAD_ROWS, vocab]`` for rows of :meth:`hidden`, in order."""
        for start in range(0, len(hidden), HEAD_ROWS):
            yield self.model.head(hidden[start : start + HEAD_ROWS])
