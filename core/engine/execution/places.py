"""Where tokens are in the cache: what layers need beside the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.drafter import DraftRows
from engine.execution.kv_cache import KVCache
from engine.execution.model import StepContext
from engine.step.tables import DeviceTables

Rotate = Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]


@dataclass(slots=True)
class Place:
    """The place of some tokens."""

    positions: Tensor
    """int64 ``[num_tokens]``. While a program is written, this and the slots are values."""
    slot_mapping: Tensor
    attention: AttentionBatch
    staged: Any = None
    """By the attention kernel, when it is first needed."""
    chain: Chained | None = None
    """The places this one was made with, and which of them it is."""
    index: int = 0

    def context(self, rotate: Rotate, attention: AttentionKernel, kv: KVCache) -> StepContext:
        if self.staged is None:
            self.staged = attention.stage(self.attention)
        return StepContext(self.rotations(rotate), self.slot_mapping, self.staged, kv)

    def rotations(self, rotate: Rotate) -> tuple[tuple[Tensor, Tensor], ...]:
        return rotate(self.positions) if self.chain is None else self.chain.rotations(rotate)[self.index]


@dataclass(slots=True)
class Chained:
    """Places one behind the other share the tables of their rotations."""

    positions: Tensor
    """int64 ``[steps, num_rows]``"""
    _by_layers: dict[int, list[tuple[tuple[Tensor, Tensor], ...]]] = field(default_factory=dict)

    def rotations(self, rotate: Rotate) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Tables by step."""
        found = self._by_layers.get(id(rotate))
        if found is None:
            steps, rows = self.positions.shape
            tables = rotate(self.positions.flatten())
            cuts = [slice(step * rows, (step + 1) * rows) for step in range(steps)]
            found = [tuple((cos[cut], sin[cut]) for cos, sin in tables) for cut in cuts]
            self._by_layers[id(rotate)] = found
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    batch: AttentionBatch
    staged: Any


_ALIGNED = 4
"""Lengths of a step begin at multiples of so many int32: kernels are compiled anew for pointers aligned less well."""


class RecordedPlaces:
    """Where the drafts of a recorded step go. What the attention kernel reads stays where it is, and is staged when
    drafts are first proposed, in front of the recording; no two calls of a pass share any of it. Keep this as long as
    what was recorded with it."""

    def __init__(
        self,
        tables: DeviceTables,
        step: AttentionBatch,
        attention: AttentionKernel,
        lend: Callable[[int, int], Tensor],
    ) -> None:
        """``step``: the recorded step's, whose block tables its recording fills; ``lend``: the n-th block tables of a
        pass, and how many rows they have, until the next recording is made."""
        self._tables = tables
        self._step = step
        self._attention = attention
        self._lend = lend
        self._chains: dict[tuple[int, int], list[_Kept]] = {}
        self._blocks: dict[tuple[int, int], _Kept] = {}
        """Both by the number of the call within its pass, and by steps or width."""
        self._calls = 0

    def begin(self) -> None:
        """A pass begins. It asks for what the passes before have asked for."""
        self._calls = 0

    def places(self, rows: DraftRows, steps: int) -> list[Place]:
        """See :meth:`engine.contracts.drafter.DraftEngine.places`."""
        count = self._count(rows)
        if not steps:
            return []
        call = self._call(), steps
        if call not in self._chains:
            self._chains[call] = self._stage_chain(count, steps)
        positions = rows.positions + torch.arange(steps, device=rows.positions.device)[:, None]
        mapping = self._tables.slot_mapping(rows.slots.expand_as(positions), positions)
        chain, found = Chained(positions), []
        for j, kept in enumerate(self._chains[call]):
            kept.batch.kv_lens_device.copy_(positions[j] + 1)
            found.append(Place(positions[j], mapping[j], kept.batch, kept.staged, chain, j))
        return found

    def block(self, rows: DraftRows, width: int) -> Place:
        """See :meth:`engine.contracts.drafter.DraftEngine.block`."""
        count, call = self._count(rows), (self._call(), width)
        if call not in self._blocks:
            self._blocks[call] = self._stage(self._lend(call[0], count * width), self._lengths(1, count * width)[0])
        kept = self._blocks[call]
        positions = (rows.positions[:, None] + torch.arange(width, device=rows.positions.device)).flatten()
        slots = rows.slots[:, None].expand(count, width).flatten()
        kept.batch.kv_lens_device.view(count, width).copy_((rows.positions + width)[:, None].expand(count, width))
        blocks = self._step.block_tables[:, None]
        kept.batch.block_tables.view(count, width, -1).copy_(blocks.expand(count, width, blocks.shape[-1]))
        return Place(positions, self._tables.slot_mapping(slots, positions), kept.batch, kept.staged)

    def _call(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _count(self, rows: DraftRows) -> int:
        """Number of rows. Raises ``ValueError`` unless they are those of the step."""
        count = len(self._step.q_lens)
        if rows.index != tuple(range(count)) or rows.slots.shape[0] != count:
            raise ValueError(
                f"a recorded drafter asked for the places of rows {list(rows.index)}: expected those that it was "
                f"given, all {count} of the step and in their order"
            )
        return count

    def _stage_chain(self, count: int, steps: int) -> list[_Kept]:
        return [self._stage(self._step.block_tables, lengths) for lengths in self._lengths(steps, count)]

    def _lengths(self, steps: int, count: int) -> list[Tensor]:
        """Room for ``steps`` times ``count`` lengths."""
        padded = -(-count // _ALIGNED) * _ALIGNED
        return [row[:count] for row in torch.ones(steps, padded, dtype=torch.int32, device=self._tables.device)]

    def _stage(self, block_tables: Tensor, lengths: Tensor) -> _Kept:
        """One token a row; ``lengths``: int32 ``[rows]``, to be overwritten."""
        count = len(lengths)
        batch = AttentionBatch(
            q_lens=(1,) * count,
            kv_lens=(1,) * count,
            block_tables=block_tables,
            q_starts=torch.arange(count + 1, dtype=torch.int32, device=self._tables.device),
            kv_lens_device=lengths,
            block_size=self._tables.block_size,
        )
        return _Kept(batch, self._attention.stage(batch))
