"""Device tables, indexed by request slot: token history and block table of everything that runs.

Row ``num_slots`` is nobody's: padding rows point there. Only the device thread touches these tensors, in plan order,
so a slot or block that was freed and reused is always written after its former owner's last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.execution.model import ForwardBatch
from engine.execution.step import Admit, StepPlan, StepRow

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

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions, new blocks and drafts."""
        for admit in plan.admits:
            self.slots[admit.slot] = SlotState(admit, len(admit.tokens))
            row = self.tokens[admit.slot]
            row[: len(admit.tokens)] = torch.tensor(admit.tokens, dtype=torch.int64)
            row[len(admit.tokens) :] = UNWRITTEN
        for step_row in plan.rows:
            if step_row.new_blocks:
                stop = step_row.block_start + len(step_row.new_blocks)
                self.block_tables[step_row.slot, step_row.block_start : stop] = torch.tensor(
                    step_row.new_blocks, dtype=torch.int32
                )
            if step_row.drafts:
                start = step_row.start + step_row.num_tokens
                self.tokens[step_row.slot, start : start + len(step_row.drafts)] = torch.tensor(
                    step_row.drafts, dtype=torch.int64
                )

    def inputs(self, rows: tuple[StepRow, ...]) -> ForwardBatch:
        """Flat inputs of one forward pass, rows one after another."""
        q_lens = tuple(row.num_queries for row in rows)
        kv_lens = tuple(row.end for row in rows)
        if all(n == 1 for n in q_lens):
            slots = torch.tensor([row.slot for row in rows], device=self.device)
            positions = torch.tensor([row.start for row in rows], device=self.device)
        else:
            slots = torch.cat([torch.full((row.num_queries,), row.slot) for row in rows]).to(self.device)
            positions = torch.cat([torch.arange(row.start, row.end) for row in rows]).to(self.device)
        blocks = self.block_tables[slots, positions // self.block_size]
        starts = [0]
        for n in q_lens:
            starts.append(starts[-1] + n)
        max_blocks = -(-max(kv_lens) // self.block_size)
        row_slots = torch.tensor([row.slot for row in rows], device=self.device)
        attention = AttentionBatch(
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_tables=self.block_tables[row_slots, :max_blocks],
            q_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=self.device),
            block_size=self.block_size,
        )
        return ForwardBatch(
            token_ids=self.tokens[slots, positions],
            positions=positions,
            slot_mapping=blocks.to(torch.int64) * self.block_size + positions % self.block_size,
            attention=attention,
        )

    def history(self, slot: int, known: int) -> Tensor:
        """The first ``known`` tokens of a slot, as a view."""
        return self.tokens[slot, :known]

    def write_outputs(self, written: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        """Sampled tokens become the next step's inputs: ``(slot, first position, tokens)`` each."""
        slots = [slot for slot, _, tokens in written for _ in tokens]
        positions = [first + i for _, first, tokens in written for i in range(len(tokens))]
        values = [token for _, _, tokens in written for token in tokens]
        if values:
            self.tokens[torch.tensor(slots), torch.tensor(positions)] = torch.tensor(values, device=self.device)
