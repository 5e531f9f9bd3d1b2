"""Everything a captured step reads, from each row's id and the device tables, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch

BLOCK_IDS = 1024
"""Block-table entries one program copies."""


@triton.jit
def step_inputs(
    inputs_ptr, tokens_ptr, tables_ptr, computed_ptr,
    ids_ptr, positions_ptr, row_ids_ptr, mapping_ptr, lengths_ptr, row_tables_ptr,
    tokens_stride, tables_stride, tables_group, mapping_group, row_tables_group, num_blocks, nobody,
    QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``(row, part, group)``: part 0 makes the row's tokens and their slots, every part copies ``BLOCK`` ids of
    its block table. ``*_group``: strides between KV groups. All groups write the same tokens."""
    row, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_id = tl.load(inputs_ptr + row)
    table = tables_ptr + group * tables_group + row_id * tables_stride
    mapping_ptr += group * mapping_group
    row_tables_ptr += group * row_tables_group
    entry = part * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(table + entry, mask=entry < num_blocks, other=0)
    tl.store(row_tables_ptr + row * num_blocks + entry, ids, mask=entry < num_blocks)
    if part == 0:
        start = tl.load(computed_ptr + row_id)
        query = tl.arange(0, BLOCK_Q)
        real = query < QUERIES
        position = start + query
        token = tl.load(tokens_ptr + row_id * tokens_stride + position, mask=real, other=0)
        block = tl.load(table + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        at = row * QUERIES + query
        # After its last query a row may find an entry nobody has written yet, which is -1.
        tl.store(ids_ptr + at, tl.maximum(token, 0), mask=real)
        tl.store(positions_ptr + at, position, mask=real)
        last = tl.load(inputs_ptr + tl.num_programs(0) + row)
        tl.store(row_ids_ptr + at, tl.where(query <= last, row_id, nobody), mask=real)
        tl.store(mapping_ptr + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=real)
        tl.store(lengths_ptr + row, (start + QUERIES).to(tl.int32))


def fill_step(
    inputs: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    computed: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    row_ids: Tensor,
    slot_mappings: Sequence[Tensor],
    attention: Sequence[AttentionBatch],
    nobody: int,
) -> None:
    """Overwrite the tensors of a batch of ``rows`` times ``queries`` tokens.

    ``inputs``: int64 ``[2, rows]``, each row's id and how many tokens it has after its first one; ``tokens`` int64
    ``[rows, positions]``, ``block_tables`` int32 ``[groups, rows, blocks]`` and ``computed`` int64 ``[rows]`` (the
    position that a row's first token has) are the device tables, ``block_size`` the tokens of a block of theirs.
    Written: ``token_ids``, ``positions``, ``row_ids`` (``nobody`` for padding after a row's last token) and each of
    ``slot_mappings`` (int64 ``[rows * queries]``), and of ``attention`` the block tables and the lengths, which are one
    tensor for all groups whose tokens this rank has; slots are as if it had those of every group. Tensors of the KV
    groups must be equally far from each other.
    """
    rows = inputs.shape[1]
    groups, _, num_blocks = block_tables.shape
    queries, first = token_ids.shape[0] // rows, attention[0]
    lengths = next((batch.kv_lens_device for batch in attention if batch.key_ends is None), first.kv_lens_device)
    step_inputs[(rows, triton.cdiv(num_blocks, BLOCK_IDS), groups)](
        inputs, tokens, block_tables, computed,
        token_ids, positions, row_ids, slot_mappings[0], lengths, first.block_tables,
        tokens.stride(0), block_tables.stride(1), block_tables.stride(0), distance(slot_mappings),
        distance([batch.block_tables for batch in attention]), num_blocks, nobody,
        QUERIES=queries, BLOCK_SIZE=block_size, BLOCK_Q=triton.next_power_of_2(queries),
        BLOCK=BLOCK_IDS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def distance(tensors: Sequence[Tensor]) -> int:
    """Elements from each tensor to the next; 0 where there is one, or none."""
    pointers = [tensor.data_ptr() for tensor in tensors]
    found = {(after - before) // tensors[0].element_size() for before, after in pairwise(pointers)}
    assert len(found) < 2, "tensors of KV groups lie unevenly"
    return found.pop() if found else 0
