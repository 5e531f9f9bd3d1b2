"""A model on a paged cache, and no engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import Graph
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.quantizer import Quantizer
from engine.kernels.context import ForwardBatch
from engine.kernels.loading import load_model
from engine.kernels.model import LoweredModel
from engine.kernels.settings import Kernels
from engine.kv.cache import KVCache
from engine.kv.groups import CacheGroups, cache_groups
from engine.step.tables import BlockShare
from engine.testing.attention_cases import PlainFormat
from engine.testing.plain import PlainAttention, PlainQuantizer

BLOCK = 8
"""Tokens."""
Row = tuple[int, Sequence[int]]
"""A sequence and its next tokens."""


def loaded(
    model: ModelFacts, graph: Graph, kernels: Kernels = "torch", quantizer: Quantizer | None = None
) -> LoweredModel:
    """The model with plain plugins, in float32 on a CPU. ``model.path``: where its weights are."""
    plugins = quantizer or PlainQuantizer(), PlainAttention(), PlainFormat()
    return load_model(model, graph, *plugins, "float32", "cpu", kernels=kernels)


class PagedLoop:
    """Sequences on one cache, on a CPU. Their blocks are scattered over it."""

    def __init__(
        self,
        model: LoweredModel,
        dtype: str = "float32",
        num_blocks: int = 64,
        kv_format: KVFormat | None = None,
        groups: CacheGroups | None = None,
    ) -> None:
        """``groups``: of the model's caches, where those are not all of a model."""
        self.model = model
        self._groups = groups or cache_groups(model.graph.caches)
        shares = self._groups.token_shares
        self._stretches = [None if share is None else BlockShare.of(share, BLOCK) for share in shares]
        counts = (num_blocks,) * self._groups.num_groups
        self.kv = KVCache(self._groups, kv_format or PlainFormat(), counts, BLOCK, dtype, "cpu")
        self._free: list[int] = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        """Of each sequence: where its next tokens go. Less than it was: what is after is forgotten."""

    def add(self) -> int:
        """A sequence of no tokens."""
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    def continued(self, sequence: int, length: int) -> int:
        """A sequence that begins with so many tokens of another: it shares their blocks, and has a copy of the one in
        which they end."""
        table = self.tables[sequence]
        shared = table[: length // BLOCK]
        if length % BLOCK:
            shared.append(self._free.pop())
            for group in range(self._groups.num_groups):
                self.kv.copy_block(group, table[length // BLOCK], shared[-1])
        self.tables.append(shared)
        self.lengths.append(length)
        return len(self.tables) - 1

    def step(self, rows: Sequence[Row], aux_layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """The residual of every token, and of some layers. All rows are computed in one step."""
        return self.model.forward(self._batch(rows), self.kv, aux_layers)

    def logits(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """Of every token of each row, float32 ``[num_tokens, vocab]``."""
        hidden, _ = self.step(rows)
        return torch.split(self.model.head(hidden), [len(tokens) for _, tokens in rows])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``prompt``, one a step."""
        sequence, new, found = self.add(), list(prompt), []
        for _ in range(count):
            hidden, _ = self.step([(sequence, new)])
            new = [int(self.model.head(hidden[-1:]).argmax())]
            found += new
        return found

    def _batch(self, rows: Sequence[Row]) -> ForwardBatch:
        columns: tuple[list[int], ...] = ([], [], [], [])
        tokens, positions, blocks, owners = columns
        for sequence, new in rows:
            table, start = self.tables[sequence], self.lengths[sequence]
            end = self.lengths[sequence] = start + len(new)
            while len(table) * BLOCK < end:
                table.append(self._free.pop())
            blocks += [table[position // BLOCK] for position in range(start, end)]
            positions += range(start, end)
            tokens += new
            owners += [sequence] * len(new)
        token_ids, at, held_in, row_ids = map(torch.tensor, columns)
        # Each group has as many blocks as the others: a table is the same in all of them.
        slots = [
            held_in * BLOCK + at % BLOCK if one is None else one.slots(held_in, at % BLOCK) for one in self._stretches
        ]
        whole = self._attention(rows)
        batches = [whole if one is None else _shared(whole, one, at) for one in self._stretches]
        return ForwardBatch(token_ids, at, tuple(slots), tuple(batches), row_ids)

    def _attention(self, rows: Sequence[Row]) -> AttentionBatch:
        tables = [self.tables[sequence] for sequence, _ in rows]
        q_lens = tuple(len(tokens) for _, tokens in rows)
        kv_lens = tuple(self.lengths[sequence] for sequence, _ in rows)
        longest = max(map(len, tables))
        return AttentionBatch(
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_tables=torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables]).int(),
            q_starts=torch.tensor([0, *q_lens]).cumsum(0).int(),
            kv_lens_device=torch.tensor(kv_lens).int(),
            block_size=BLOCK,
        )


def _shared(whole: AttentionBatch, stretch: BlockShare, positions: Tensor) -> AttentionBatch:
    """What a rank sees of a batch that caches a stretch of every block."""
    return replace(
        whole,
        kv_lens=tuple(stretch.most(length) for length in whole.kv_lens),
        kv_lens_device=stretch.length(whole.kv_lens_device).int(),
        block_size=stretch.size,
        key_ends=stretch.length(positions + 1).int(),
    )
