import pytest

from engine.contracts.kv_allocator import Lease
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.sequence import Sequence
from engine.step.plan import NewBlocks, RowResult

ALL_BLOCKS = (NewBlocks(0, 0, (5, 6, 7, 8)),)


def sequence(prompt_len=10, max_tokens=20, cached=0):
    request = EngineRequest("r", tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens))
    found = Sequence(request, 1, 7, frozenset((3,)), prompt_len + max_tokens, 0.0, list(request.prompt))
    found.admit(2, Lease("r", ([5, 6, 7, 8],), cached, cached))
    return found


def counts(s):
    return s.computed, s.scheduled, s.known


def test_a_prompt_in_chunks_then_one_token_a_step():
    s = sequence()
    assert s.admission().num_computed == 0 and s.blocks_sent == [0]
    first = s.schedule(0, 6, 0, 0)
    assert (first.max_start, first.samples, first.new_blocks) == (0, False, ALL_BLOCKS)
    second = s.schedule(1, 4, 0, 0)
    assert (second.max_start, second.samples, second.new_blocks) == (6, True, ())
    assert counts(s) == (0, 10, 11) and s.decodes
    s.commit(first, RowResult(), 0)
    s.commit(second, RowResult((99,)), 1)
    assert counts(s) == (10, 10, 11) and s.tokens[-1] == 99 and s.num_outputs == 1


def test_a_cached_prefix_is_computed_already():
    s = sequence(cached=8)
    assert counts(s) == (8, 8, 10) and s.admission().num_computed == 8


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_steps_in_flight_count_as_if_all_drafts_were_accepted_until_they_retire(accepted):
    s = sequence()
    s.admission()
    s.commit(s.schedule(0, 10, 0, 3), RowResult((50,)), 1)
    assert s.device_drafts == 3
    first = s.schedule(1, 1, 3, 3)
    assert counts(s) == (10, 14, 15)
    second = s.schedule(2, 1, 3, 0)
    assert (second.max_start, counts(s)) == (14, (10, 18, 19))
    s.commit(first, RowResult(tuple(range(accepted + 1)), accepted), accepted + 1)
    assert counts(s) == (11 + accepted, 15 + accepted, 16 + accepted)
    s.commit(second, RowResult((1,), 0), 1)
    assert counts(s) == (12 + accepted, 12 + accepted, 13 + accepted)


def test_an_output_that_ends_inside_its_drafts_keeps_the_counts_in_order():
    s = sequence()
    s.admission()
    s.commit(s.schedule(0, 10, 0, 3), RowResult((50,)), 1)
    s.commit(s.schedule(1, 1, 3, 0), RowResult((1, 2, 3, 4), 3), 2)
    assert counts(s) == (13, 13, 13) and s.tokens[-2:] == [1, 2]


def test_it_waits_where_steps_in_flight_may_reach_the_end():
    s = sequence(max_tokens=5)
    s.admission()
    first = s.schedule(0, 10, 0, 3)
    assert s.can_run and s.max_drafts == 3
    s.commit(first, RowResult((50,)), 1)
    row = s.schedule(1, 1, 3, 0)
    assert not s.can_run, "all 15 tokens may be there after this step"
    s.commit(row, RowResult((1,), 0), 1)
    assert s.can_run and s.max_drafts == 2


def test_rolled_back_it_goes_on_from_what_is_confirmed_and_the_row_is_admitted_again():
    s = sequence()
    s.admission()
    s.commit(s.schedule(0, 10, 0, 2), RowResult((50,)), 1)
    s.schedule(1, 1, 2, 2)
    s.roll_back()
    assert counts(s) == (10, 10, 11) and not s.is_on_device and s.device_drafts == 0 and s.epoch == 1
    admission = s.admission()
    assert (admission.row_id, admission.num_computed, admission.tokens[-1]) == (2, 10, 50)
    assert s.schedule(2, 1, 0, 0).new_blocks == ALL_BLOCKS, "its row's block table was wiped"


def test_preempted_it_keeps_nothing_but_its_tokens():
    s = sequence()
    s.admission()
    s.commit(s.schedule(0, 10, 0, 2), RowResult((50,)), 1)
    s.schedule(1, 1, 2, 2)
    assert s.leave() == (2, Lease("r", ([5, 6, 7, 8],), 0, 0))
    s.reset()
    assert counts(s) == (0, 0, 11) and s.tokens[-1] == 50 and s.num_preemptions == 1 and s.lease is None


def test_tokens_that_were_never_scheduled_cannot_be_committed():
    s = sequence()
    s.admission()
    row = s.schedule(0, 10, 0, 0)
    s.commit(row, RowResult((50,)), 1)
    with pytest.raises(AssertionError):
        s.commit(row, RowResult((51,)), 1)


def test_each_group_is_sent_the_blocks_it_has_got() -> None:
    request = EngineRequest("r", tuple(range(20)), SamplingParams(max_tokens=4))
    s, lease = Sequence(request, 1, 7, frozenset(), 24, 0.0, list(request.prompt)), Lease("r", ([5, 6], [0, 9]), 8, 8)
    s.admit(2, lease)
    s.admission()
    assert s.schedule(0, 4, 0, 0).new_blocks == (NewBlocks(0, 0, (5, 6)), NewBlocks(1, 0, (0, 9)))
    lease.blocks[1].append(7)
    assert s.schedule(1, 4, 0, 0).new_blocks == (NewBlocks(1, 2, (7,)),)
    assert s.schedule(2, 1, 0, 0).new_blocks == ()
