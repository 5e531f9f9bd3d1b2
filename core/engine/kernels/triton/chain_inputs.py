"""Where all steps of a chain of drafts go, from each row's id and the device tables, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.step_inputs import BLOCK_IDS, distance

BLOCK_STEPS = 16
"""Steps that a program places at once."""


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_steps", "num_blocks", "tables_stride", "tables_group", "lengths_stride", "row_tables_group",
    ],
    do_not_specialize_on_alignment=["row_ptr", "start_ptr"],
)  # fmt: skip
def chain_inputs(
    row_ptr, start_ptr, tables_ptr, positions_ptr, mapping_ptr, lengths_ptr, row_tables_ptr,
    num_rows, num_steps, num_blocks, tables_stride, tables_group, lengths_stride, row_tables_group,
    BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``(row, part, group)``: part 0 makes the row's positions, slots and lengths, every part copies ``BLOCK``
    ids of its block table. ``*_group``: strides between KV groups. All groups write the same positions and lengths.
    Launched normally: what is written here is read before the wait (see ``wait_for_input``)."""
    row, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    table = tables_ptr + group * tables_group + tl.load(row_ptr + row) * tables_stride
    if row_tables_ptr is not None:
        entry = part * BLOCK + tl.arange(0, BLOCK)
        ids = tl.load(table + entry, mask=entry < num_blocks, other=0)
        tl.store(row_tables_ptr + group * row_tables_group + row * num_blocks + entry, ids, mask=entry < num_blocks)
    if part == 0:
        start = tl.load(start_ptr + row)
        mapping_ptr += group * num_steps * num_rows
        for first in range(0, num_steps, STEPS):
            step = first + tl.arange(0, STEPS)
            real, at, position = step < num_steps, step * num_rows + row, start + step
            block = tl.load(table + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
            tl.store(positions_ptr + at, position, mask=real)
            tl.store(mapping_ptr + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=real)
            tl.store(lengths_ptr + step * lengths_stride + row, (position + 1).to(tl.int32), mask=real)


def fill_chain(
    row_ids: Tensor,
    starts: Tensor,
    block_tables: Tensor,
    block_size: int,
    lengths: Tensor,
    row_tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of a chain, int64 ``[steps, rows]``, and by KV group their slots, int64 ``[groups, steps,
    rows]``.

    ``row_ids``, ``starts``: int64 ``[rows]``, each row's id and the position that its chain begins at;
    ``block_tables``: int32 ``[groups, table rows, blocks]``, those of the device tables, ``block_size`` the tokens of a
    block of theirs. Written: ``lengths`` (int32 ``[steps, rows or more]``), the keys that each step sees, and
    ``row_tables`` (of each KV group, equally far from each other, int32 ``[rows, blocks or fewer]``; empty: none), the
    beginning of each row's block table.
    """
    rows, steps, groups = len(row_ids), len(lengths), len(block_tables)
    assert row_ids.is_contiguous() and starts.is_contiguous() and lengths.stride(1) == 1
    positions = torch.empty(steps, rows, dtype=torch.int64, device=row_ids.device)
    slots = torch.empty(groups, steps, rows, dtype=torch.int64, device=row_ids.device)
    num_blocks = row_tables[0].shape[1] if row_tables else 0
    chain_inputs[(rows, max(1, triton.cdiv(num_blocks, BLOCK_IDS)), groups)](
        row_ids, starts, block_tables, positions, slots, lengths, row_tables[0] if row_tables else None,
        rows, steps, num_blocks, block_tables.stride(1), block_tables.stride(0), lengths.stride(0),
        distance(row_tables), BLOCK_SIZE=block_size, STEPS=BLOCK_STEPS, BLOCK=BLOCK_IDS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return positions, slots
