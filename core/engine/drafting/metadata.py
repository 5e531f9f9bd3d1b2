"""Where the drafts of a captured step go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.drafter import DraftRows
from engine.kernels.context import prepared_of
from engine.kernels.metadata import Chained, ForwardMetadata
from engine.kernels.triton.device import runs_triton
from engine.step.tables import DeviceTables

_ALIGNED = 4
"""Lengths of a step begin at multiples of so many int32: kernels are compiled anew for pointers aligned less well."""


def chain_lengths(steps: int, count: int, device: str) -> Tensor:
    """Memory for the lengths of ``count`` rows: int32 ``[steps, count]``, whose rows lie apart."""
    return torch.empty(steps, -(-count // _ALIGNED) * _ALIGNED, dtype=torch.int32, device=device)[:, :count]


@dataclass(frozen=True, slots=True)
class PlacedChain:
    """Where all steps of chains go, one token a row and step."""

    positions: Tensor
    """int64 ``[steps, rows]``"""
    slot_mappings: tuple[Tensor, ...]
    """By KV group, int64 ``[steps, rows]``"""
    chain: Chained

    def at(self, step: int, attention: tuple[AttentionBatch, ...], prepared: tuple[Any, ...] | None) -> ForwardMetadata:
        """Of one step."""
        slots = tuple([mapping[step] for mapping in self.slot_mappings])
        return ForwardMetadata(self.positions[step], slots, attention, prepared, self.chain, step)


def place_chain(
    tables: DeviceTables, rows: DraftRows, lengths: Tensor, row_tables: Sequence[Tensor] = ()
) -> PlacedChain:
    """Chains from each row's newest token on. Overwrites ``lengths`` (int32 ``[steps, rows]``), the keys that each step
    sees, and ``row_tables`` (of each KV group, int32 ``[rows, blocks]``, as :func:`engine.step.graphs.apart` makes
    them; empty: none), the beginning of each row's block table. On a GPU in one launch."""
    row_ids, starts = rows.row_ids.contiguous(), rows.positions.contiguous()
    if runs_triton(tables.device) and not any(tables.block_shares):
        from engine.kernels.triton.chain_inputs import fill_chain  # Triton is imported only where it runs

        positions, of_groups = fill_chain(row_ids, starts, tables.block_tables, tables.block_size, lengths, row_tables)
        slots = tuple(of_groups)
    else:
        positions = starts + torch.arange(len(lengths), device=starts.device)[:, None]
        slots = tables.slot_mappings(row_ids.expand_as(positions), positions)
        lengths.copy_(positions + 1)
        for own, blocks in zip(row_tables, tables.block_tables, strict=False):
            own.copy_(blocks[row_ids, : own.shape[1]])
    return PlacedChain(positions, slots, Chained(positions))


@dataclass(frozen=True, slots=True)
class _Kept:
    """By KV group."""

    batches: tuple[AttentionBatch, ...]
    prepared: tuple[Any, ...]

    @property
    def lengths(self) -> Tensor:
        """int32 ``[rows]``, of all groups."""
        return self.batches[0].kv_lens_device


class CapturedMetadata:
    """Where the drafts of a captured step go. What the attention kernel reads stays where it is, and is prepared when
    drafts are first proposed, in front of the capture; no two calls of a pass share any of it. Keep this as long as
    what was captured with it."""

    def __init__(
        self,
        tables: DeviceTables,
        step: Sequence[AttentionBatch],
        attention: AttentionKernel,
        lend: Callable[[int, int, int], Tensor],
    ) -> None:
        """``step``: the captured step's, whose block tables its graph fills; ``lend``: the n-th block tables of a
        pass, of which KV group, and how many rows they have, until the next capture."""
        self._tables = tables
        self._step = step
        self._attention = attention
        self._lend = lend
        self._chains: dict[tuple[int, int], tuple[Tensor, list[_Kept]]] = {}
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
        lengths, prepared = self._chains[call]
        steps_of = place_chain(self._tables, rows, lengths)
        return [steps_of.at(j, kept.batches, kept.prepared) for j, kept in enumerate(prepared)]

    def block_metadata(self, rows: DraftRows, num_tokens: int) -> ForwardMetadata:
        """See :meth:`engine.contracts.drafter.DraftEngine.block_metadata`."""
        count, call = self._count(rows), (self._call(), num_tokens)
        if call not in self._blocks:
            total = count * num_tokens
            lent = [self._lend(call[0], group, total) for group in range(len(self._step))]
            self._blocks[call] = self._prepare(lent, chain_lengths(1, total, self._tables.device)[0].fill_(1))
        kept = self._blocks[call]
        positions = (rows.positions[:, None] + torch.arange(num_tokens, device=rows.positions.device)).flatten()
        row_ids = rows.row_ids[:, None].expand(count, num_tokens).flatten()
        kept.lengths.view(count, num_tokens).copy_((rows.positions + num_tokens)[:, None].expand(count, num_tokens))
        for own, step in zip(kept.batches, self._step, strict=True):
            blocks = step.block_tables[:, None]
            own.block_tables.view(count, num_tokens, -1).copy_(blocks.expand(count, num_tokens, blocks.shape[-1]))
        return ForwardMetadata(positions, self._tables.slot_mappings(row_ids, positions), kept.batches, kept.prepared)

    def _call(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _count(self, rows: DraftRows) -> int:
        """Number of rows. Raises ``ValueError`` unless they are those of the step."""
        count = len(self._step[0].q_lens)
        if rows.index != tuple(range(count)) or rows.row_ids.shape[0] != count:
            raise ValueError(
                f"a captured drafter asked for the forward metadata of rows {list(rows.index)}: expected those that "
                f"it was given, all {count} of the step and in their order"
            )
        return count

    def _prepare_chain(self, count: int, steps: int) -> tuple[Tensor, list[_Kept]]:
        """Memory of the lengths, and what reads it."""
        tables = [batch.block_tables for batch in self._step]
        lengths = chain_lengths(steps, count, self._tables.device).fill_(1)
        return lengths, [self._prepare(tables, row) for row in lengths]

    def _prepare(self, block_tables: Sequence[Tensor], lengths: Tensor) -> _Kept:
        """One token a row; ``block_tables``: by KV group; ``lengths``: int32 ``[rows]``, to be overwritten."""
        ones = (1,) * len(lengths)
        q_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self._tables.device)
        batches = tuple(
            AttentionBatch(ones, ones, blocks, q_starts, lengths, self._tables.block_size) for blocks in block_tables
        )
        return _Kept(batches, prepared_of(self._attention, batches))
