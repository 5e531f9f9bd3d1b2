"""Where the drafts of a captured step go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.drafter import DraftRows
from engine.kernels.metadata import Chained, ForwardMetadata
from engine.step.tables import DeviceTables


@dataclass(frozen=True, slots=True)
class _Kept:
    batch: AttentionBatch
    prepared: Any


_ALIGNED = 4
"""Lengths of a step begin at multiples of so many int32: kernels are compiled anew for pointers aligned less well."""


class CapturedMetadata:
    """Where the drafts of a captured step go. What the attention kernel reads stays where it is, and is prepared when
    drafts are first proposed, in front of the capture; no two calls of a pass share any of it. Keep this as long as
    what was captured with it."""

    def __init__(
        self,
        tables: DeviceTables,
        step: AttentionBatch,
        attention: AttentionKernel,
        lend: Callable[[int, int], Tensor],
    ) -> None:
        """``step``: the captured step's, whose block tables its graph fills; ``lend``: the n-th block tables of a
        pass, and how many rows they have, until the next capture."""
        self._tables = tables
        self._step = step
        self._attention = attention
        self._lend = lend
        self._chains: dict[tuple[int, int], list[_Kept]] = {}
        self._blocks: dict[tuple[int, int], _Kept] = {}
        """Both by the number of the call within its pass, and by steps or tokens a row."""
        self._calls = 0

    def begin(self) -> None:
        """A pass begins. It asks for what the passes before have asked for."""
        self._calls = 0

    def chain_metadata(self, rows: DraftRows, steps: int) -> list[ForwardMetadata]:
        """See :meth:`engine.contracts.drafter.DraftEngine.chain_metadata`."""
        count = self._count(rows)
        if not steps:
            return []
        call = self._call(), steps
        if call not in self._chains:
            self._chains[call] = self._prepare_chain(count, steps)
        positions = rows.positions + torch.arange(steps, device=rows.positions.device)[:, None]
        mapping = self._tables.slot_mapping(rows.row_ids.expand_as(positions), positions)
        chain, found = Chained(positions), []
        for j, kept in enumerate(self._chains[call]):
            kept.batch.kv_lens_device.copy_(positions[j] + 1)
            found.append(ForwardMetadata(positions[j], mapping[j], kept.batch, kept.prepared, chain, j))
        return found

    def block_metadata(self, rows: DraftRows, num_tokens: int) -> ForwardMetadata:
        """See :meth:`engine.contracts.drafter.DraftEngine.block_metadata`."""
        count, call = self._count(rows), (self._call(), num_tokens)
        if call not in self._blocks:
            total = count * num_tokens
            self._blocks[call] = self._prepare(self._lend(call[0], total), self._lengths(1, total)[0])
        kept = self._blocks[call]
        positions = (rows.positions[:, None] + torch.arange(num_tokens, device=rows.positions.device)).flatten()
        row_ids = rows.row_ids[:, None].expand(count, num_tokens).flatten()
        kept.batch.kv_lens_device.view(count, num_tokens).copy_(
            (rows.positions + num_tokens)[:, None].expand(count, num_tokens)
        )
        blocks = self._step.block_tables[:, None]
        kept.batch.block_tables.view(count, num_tokens, -1).copy_(
            blocks.expand(count, num_tokens, blocks.shape[-1])
        )
        return ForwardMetadata(positions, self._tables.slot_mapping(row_ids, positions), kept.batch, kept.prepared)

    def _call(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _count(self, rows: DraftRows) -> int:
        """Number of rows. Raises ``ValueError`` unless they are those of the step."""
        count = len(self._step.q_lens)
        if rows.index != tuple(range(count)) or rows.row_ids.shape[0] != count:
            raise ValueError(
                f"a captured drafter asked for the forward metadata of rows {list(rows.index)}: expected those that "
                f"it was given, all {count} of the step and in their order"
            )
        return count

    def _prepare_chain(self, count: int, steps: int) -> list[_Kept]:
        return [self._prepare(self._step.block_tables, lengths) for lengths in self._lengths(steps, count)]

    def _lengths(self, steps: int, count: int) -> list[Tensor]:
        """Memory for ``steps`` times ``count`` lengths."""
        padded = -(-count // _ALIGNED) * _ALIGNED
        return [row[:count] for row in torch.ones(steps, padded, dtype=torch.int32, device=self._tables.device)]

    def _prepare(self, block_tables: Tensor, lengths: Tensor) -> _Kept:
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
        return _Kept(batch, self._attention.prepare(batch))
