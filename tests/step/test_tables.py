"""Tables of the device: who may find what in a row."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.graph import TokenShare
from engine.step.graphs import Bucket, fill, static_batch
from engine.step.plan import NewBlocks, StepPlan, StepRow
from engine.step.tables import UNWRITTEN, BlockShare, DeviceTables

from .toy import BLOCK, MAX_DRAFTS, MAX_LEN, VOCAB, blocks_of, prompt_plan


def make_tables() -> DeviceTables:
    return DeviceTables(4, MAX_LEN, MAX_DRAFTS, BLOCK, "cpu", VOCAB)


def test_a_new_owner_of_a_row_finds_nothing_of_the_last() -> None:
    tables = make_tables()
    tables.apply(prompt_plan({1: tuple(range(10))}))
    (admit,) = prompt_plan({1: (1, 2)}).admits
    tables.computed[1] = 10
    tables.apply(StepPlan(1, (admit,), (StepRow(1, 0, 2, new_blocks=(NewBlocks(0, 0, (7,)),)),)))
    assert tables.block_tables[0, 1].tolist() == [7] + [0] * (tables.block_tables.shape[2] - 1)
    assert tables.tokens[1, :2].tolist() == [1, 2] and set(tables.tokens[1, 2:].tolist()) == {UNWRITTEN}
    assert int(tables.computed[1]) == 0


def test_a_row_starts_where_the_tables_say_whatever_the_plan_bounds() -> None:
    """Drafts in flight were counted as accepted and were not."""
    tables = make_tables()
    tables.apply(prompt_plan({0: (1, 2, 3, 4, 5, 6), 2: (7, 8, 9)}))
    tables.computed[0], tables.computed[2] = 5, 1
    rows = (StepRow(2, 4, 1, num_drafts=1), StepRow(0, 7, 1))
    found = tables.inputs(rows)
    assert found.starts.tolist() == [1, 5]
    assert found.forward.token_ids.tolist() == [8, 9, 6]
    assert found.forward.positions.tolist() == [1, 2, 5]
    blocks = {row_id: blocks_of(row_id) for row_id in (0, 2)}
    assert found.forward.slot_mappings[0].tolist() == [
        blocks[2][0] * BLOCK + 1,
        blocks[2][0] * BLOCK + 2,
        blocks[0][1] * BLOCK + 1,
    ]
    (attention,) = found.forward.attention
    assert attention.kv_lens_device.tolist() == [3, 6]
    assert attention.kv_lens == (6, 8), "bounds"


@pytest.mark.parametrize(("ranks", "block_size"), [(2, 8), (2, 64), (4, 32), (3, 24)])
def test_ranks_share_out_the_tokens_of_every_block(ranks: int, block_size: int) -> None:
    """Each token is on one rank, where those before it on that rank are its first ones."""
    size = block_size // ranks
    counts = [0] * ranks
    for position in range(3 * block_size + 5):
        owner = position % block_size // size
        for index in range(ranks):
            stretch = BlockShare.of(TokenShare(ranks, index), block_size)
            lengths = stretch.length(torch.tensor([position, position + 1]))
            assert lengths.tolist() == [counts[index], counts[index] + (index == owner)]
            assert stretch.most(position + 1) >= int(lengths[1])
            block, offset = torch.tensor([position // block_size + 1]), torch.tensor([position % block_size])
            (slot,) = stretch.slots(block, offset).tolist()
            here = (position // block_size + 1) * size + counts[index] % size
            assert slot == here if index == owner else slot < size, "of another rank: in the padding block"
        counts[owner] += 1


def test_every_query_ends_at_its_own_key_of_a_rank() -> None:
    """As the device has lengths: what the plan counts as accepted does not matter."""
    shares = (TokenShare(2, 1), None)
    tables = DeviceTables(4, MAX_LEN, MAX_DRAFTS, BLOCK, "cpu", VOCAB, 2, shares)
    admit = prompt_plan({0: tuple(range(1, 9))}).admits
    new = tuple(NewBlocks(group, 0, (5, 7, 2)) for group in range(2))
    tables.apply(StepPlan(1, admit, (StepRow(0, 0, 8, new_blocks=new),)))
    tables.computed[0] = 1
    found = tables.inputs((StepRow(0, 4, 5),)).forward
    own, whole = found.attention
    half, positions = BLOCK // 2, range(1, 6)
    assert own.block_size == half and own.key_ends is not None and whole.key_ends is None
    stretch = BlockShare.of(TokenShare(2, 1), BLOCK)
    assert own.key_ends.tolist() == [int(stretch.length(torch.tensor(at + 1))) for at in positions]
    assert own.kv_lens_device.tolist() == own.key_ends[-1:].tolist() and whole.kv_lens_device.tolist() == [6]
    assert own.kv_lens[0] >= int(own.kv_lens_device[0])
    assert found.slot_mappings[1].tolist() == [(5, 7, 2)[at // BLOCK] * BLOCK + at % BLOCK for at in positions]


def test_drafts_outside_of_the_vocabulary_are_reported_and_replaced() -> None:
    tables = make_tables()
    rows, positions = torch.tensor([2, 0]), torch.tensor([4, 9])
    assert bool(tables.write_drafts(rows, positions, torch.tensor([[0, VOCAB - 1], [3, 4]])))
    assert tables.tokens[2, 4:8].tolist() == [UNWRITTEN, 0, VOCAB - 1, UNWRITTEN]
    for token in (-1, VOCAB, 1 << 40):
        assert not bool(tables.write_drafts(rows, positions, torch.tensor([[5, 6], [7, token]])))
        assert tables.tokens[2, 5:7].tolist() == [5, 6]
        assert tables.tokens[0, 10] == 7 and 0 <= int(tables.tokens[0, 11]) < VOCAB


def test_each_group_has_slots_and_block_tables_of_its_own() -> None:
    """Filled as a captured step's they are the same: in the interpreter, by one kernel for all groups."""
    tables = DeviceTables(4, MAX_LEN, MAX_DRAFTS, BLOCK, "cpu", VOCAB, num_groups=3)
    (admit,) = prompt_plan({1: tuple(range(10))}).admits
    (other,) = prompt_plan({3: tuple(range(3))}).admits
    news = tuple(NewBlocks(group, 0, (5 + group, 0 if group else 20, 30 - group)) for group in (2, 0, 1))
    rows = (StepRow(1, 8, 1, new_blocks=news), StepRow(3, 2, 1, new_blocks=(NewBlocks(1, 0, (44,)),)))
    tables.apply(StepPlan(0, (admit, other), rows))
    assert tables.block_tables[:, 1, :3].tolist() == [[5, 20, 30], [6, 0, 29], [7, 0, 28]]
    tables.computed[1], tables.computed[3] = 8, 2
    found = tables.inputs(rows).forward
    at, offset = 8 // BLOCK, 8 % BLOCK
    assert [slots[0].item() for slots in found.slot_mappings] == [
        int(tables.block_tables[group, 1, at]) * BLOCK + offset for group in range(3)
    ]
    assert found.slot_mappings[1][1].item() == 44 * BLOCK + 2
    batch = static_batch(Bucket(2, 1), tables)
    fill(batch, torch.tensor([[1, 3], [0, 0]]), tables)
    assert batch.token_ids.tolist() == found.token_ids.tolist()
    for group in range(3):
        assert torch.equal(batch.slot_mappings[group], found.slot_mappings[group])
        width = found.attention[group].block_tables.shape[1]
        assert torch.equal(batch.attention[group].block_tables[:, :width], found.attention[group].block_tables)
        assert torch.equal(batch.attention[group].kv_lens_device, found.attention[group].kv_lens_device)
        assert batch.slot_mappings[group].data_ptr() % 16 == batch.attention[group].block_tables.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "shares", [(TokenShare(2, 0), None), (None, TokenShare(2, 1)), (TokenShare(4, 2),) * 2], ids=str
)
@pytest.mark.parametrize("queries", [1, 3])
def test_captured_steps_of_ranks_that_share_out_tokens_are_filled_as_others_are(
    shares: tuple[TokenShare | None, ...], queries: int
) -> None:
    """Again and again, while rows grow across the borders of stretches and blocks."""
    tables = DeviceTables(4, MAX_LEN, MAX_DRAFTS, BLOCK, "cpu", VOCAB, 2, shares)
    (admit,) = prompt_plan({1: tuple(range(10))}).admits
    (other,) = prompt_plan({3: tuple(range(3))}).admits
    new = tuple(NewBlocks(group, 0, (5 + group, 20, 30 - group)) for group in range(2))
    rows = (StepRow(1, 8, 1, new_blocks=new), StepRow(3, 2, 1, new_blocks=new))
    tables.apply(StepPlan(0, (admit, other), rows))
    tables.tokens[tables.tokens < 0] = 7
    batch = static_batch(Bucket(2, queries), tables)
    for step in range(2 * BLOCK):
        tables.computed[1], tables.computed[3] = step, step // 2
        fill(batch, torch.tensor([[1, 3], [0, 0]]), tables)
        found = tables.inputs(tuple(StepRow(row, 3 * BLOCK - queries, queries) for row in (1, 3))).forward
        assert torch.equal(batch.positions, found.positions)
        for group in range(2):
            own, want = batch.attention[group], found.attention[group]
            assert torch.equal(batch.slot_mappings[group], found.slot_mappings[group])
            assert torch.equal(own.block_tables[:, : want.block_tables.shape[1]], want.block_tables)
            assert own.block_size == want.block_size and torch.equal(own.kv_lens_device, want.kv_lens_device)
            assert (own.key_ends is None) == (shares[group] is None) == (want.key_ends is None)
            assert own.key_ends is None or torch.equal(own.key_ends, want.key_ends)
