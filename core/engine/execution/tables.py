"""Device tables, indexed by request slot: token history and block table of everything that runs.

Row ``num_slots`` is nobody's: padding rows point there. Only the device thread touches these tensors, in plan order,
so a slot or block that was freed and reused is always written after its former owner's last step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.execution.model import ForwardBatch
from engine.execution.step import Admit, StepPlan, StepRow
from engine.execution.transfer import upload

UNWRITTEN = -1
"""Poison of token-table entries nobody has written: reading one would index the embedding out of range."""


@dataclass(slots=True)
class SlotState:
    """What sampling needs to know of the request in a slot."""

    admit: Admit
    known: int
    """Tokens in the slot's token table."""


class DeviceTables:
    """``tokens``: int64 ``[num_slots + 1, max_len + max_draft_width + 2]``;
    ``block_tables``: int32 ``[num_slots + 1, max_blocks]``."""

    def __init__(self, num_slots: int, max_len: int, max_draft_width: int, block_size: int, device: str) -> None:
        width = max_len + max_draft_width + 2
        self.block_size = block_size
        self.device = device
        self.tokens = torch.full((num_slots + 1, width), UNWRITTEN, dtype=torch.int64, device=device)
        max_blocks = -(-width // block_size)
        self.block_tables = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self.slots: dict[int, SlotState] = {}
        self.nobody = num_slots
        """The row no request has: padding rows read and write it, and it always holds tokens."""
        self.tokens[self.nobody] = 0

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions, new blocks and drafts."""
        for admit in plan.admits:
            self.slots[admit.slot] = SlotState(admit, len(admit.tokens))
            row = self.tokens[admit.slot]
            row[: len(admit.tokens)] = upload(admit.tokens, torch.int64, self.device)
            row[len(admit.tokens) :] = UNWRITTEN
            # The former owner's blocks may be somebody else's now; block 0 is nobody's.
            self.block_tables[admit.slot] = 0
        width = self.block_tables.shape[1]
        blocks: list[tuple[int, int]] = []
        for step_row in plan.rows:
            blocks += enumerate(step_row.new_blocks, step_row.slot * width + step_row.block_start)
        _scatter(self.block_tables, blocks)
        self.write_drafts(plan.rows)

    def write_drafts(self, rows: Sequence[StepRow]) -> None:
        """Put the rows' drafts behind their tokens."""
        width = self.tokens.shape[1]
        drafts: list[tuple[int, int]] = []
        for row in rows:
            drafts += enumerate(row.drafts, row.slot * width + row.start + row.num_tokens)
        _scatter(self.tokens, drafts)

    def inputs(self, rows: tuple[StepRow, ...]) -> ForwardBatch:
        """Flat inputs of one forward pass, rows one after another."""
        q_lens = tuple(row.num_queries for row in rows)
        kv_lens = tuple(row.end for row in rows)
        row_slots = [row.slot for row in rows]
        row_starts = [row.start for row in rows]
        if all(n == 1 for n in q_lens):
            q_starts = list(range(len(rows) + 1))
            parts = _upload_parts((row_slots, row_starts, q_starts, kv_lens), self.device)
            slots, positions, starts, lengths = parts
            per_row = slots
        else:
            flat_slots = [row.slot for row in rows for _ in range(row.num_queries)]
            flat_positions = [position for row in rows for position in range(row.start, row.end)]
            q_starts = list(accumulate(q_lens, initial=0))
            parts = _upload_parts((flat_slots, flat_positions, q_starts, kv_lens, row_slots), self.device)
            slots, positions, starts, lengths, per_row = parts
        max_blocks = -(-max(kv_lens) // self.block_size)
        attention = AttentionBatch(
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_tables=self.block_tables[per_row, :max_blocks],
            q_starts=starts.to(torch.int32),
            kv_lens_device=lengths.to(torch.int32),
            block_size=self.block_size,
        )
        return ForwardBatch(
            token_ids=self.tokens[slots, positions],
            positions=positions,
            slot_mapping=self.slot_mapping(slots, positions),
            attention=attention,
            slots=slots,
        )

    def slot_mapping(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the keys and values of tokens go: int64, of the shape of ``slots`` and ``positions``."""
        blocks = self.block_tables[slots, positions // self.block_size]
        return blocks.to(torch.int64) * self.block_size + positions % self.block_size

    def write(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Tokens the device chose become inputs of later steps; all int64 and of one shape.

        A broken row's -1 becomes 0: the step behind it may be queued already, it is dropped, but must find a token
        to embed.
        """
        self.tokens[slots, positions] = tokens.clamp(min=0)

    def history(self, slot: int, known: int) -> Tensor:
        """The first ``known`` tokens of a slot, as a view."""
        return self.tokens[slot, :known]


def _scatter(table: Tensor, entries: list[tuple[int, int]]) -> None:
    """``table.flatten()[index] = value`` for each ``(index, value)``. ``table``: int32 or int64, contiguous."""
    if not entries:
        return
    if table.device.type == "cpu":
        # A few numbers a step, written in a tenth of the time that torch takes.
        number = ctypes.c_int64 if table.dtype == torch.int64 else ctypes.c_int32
        numbers = (number * table.numel()).from_address(table.data_ptr())
        for at, value in entries:
            numbers[at] = value
    else:
        index, values = _upload_parts(tuple(zip(*entries, strict=True)), str(table.device))
        table.view(-1)[index] = values.to(table.dtype)


def _upload_parts(parts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, ...]:
    """Several int64 vectors in one copy."""
    together = upload([value for part in parts for value in part], torch.int64, device)
    return torch.split(together, [len(part) for part in parts])
