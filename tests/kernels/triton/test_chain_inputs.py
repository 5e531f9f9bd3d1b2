"""Where the steps of a chain go is what torch operations would say."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.kernels.triton import chain_inputs
from engine.kernels.triton.chain_inputs import BLOCK_STEPS, fill_chain
from engine.step.graphs import apart
from engine.step.tables import DeviceTables

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
BLOCK_SIZE, MAX_LEN, GUARD = 8, 200, 77


def tables(groups: int) -> DeviceTables:
    found = DeviceTables(5, MAX_LEN, 40, BLOCK_SIZE, DEVICE, 100, groups)
    found.block_tables.copy_(torch.arange(found.block_tables.numel()).view(found.block_tables.shape))
    return found


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("steps", [1, 7, BLOCK_STEPS, 2 * BLOCK_STEPS + 1])
def test_positions_slots_lengths_and_block_tables_are_those_of_torch(
    steps: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_inputs, "BLOCK_IDS", 4)  # rows of several programs
    known = tables(groups)
    row_ids, starts = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([0, 7, MAX_LEN], device=DEVICE)
    lengths = torch.full((steps, 4), GUARD, dtype=torch.int32, device=DEVICE)
    row_tables = apart(groups, (3, 9), torch.int32, DEVICE)
    positions, slots = fill_chain(row_ids, starts, known.block_tables, BLOCK_SIZE, lengths[:, :3], row_tables)
    expected = starts + torch.arange(steps, device=DEVICE)[:, None]
    assert torch.equal(positions, expected)
    for found, want in zip(slots, known.slot_mappings(row_ids.expand_as(expected), expected), strict=True):
        assert torch.equal(found, want)
    assert torch.equal(lengths[:, :3], (expected + 1).to(torch.int32)) and set(lengths[:, 3].tolist()) == {GUARD}
    for own, table in zip(row_tables, known.block_tables, strict=True):
        assert torch.equal(own, table[row_ids, :9])


def test_without_block_tables_to_write_none_are_written() -> None:
    known = tables(2)
    row_ids, lengths = torch.tensor([3], device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    positions, _ = fill_chain(row_ids, row_ids + 1, known.block_tables, BLOCK_SIZE, lengths, ())
    assert positions.tolist() == [[4], [5]] and lengths.tolist() == [[5], [6]]
