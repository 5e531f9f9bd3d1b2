import pytest

from engine.assembly.bind import bind
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kv.block_keys import BlockKeys
from engine.loop.ledger import InFlight, Ledger
from engine.loop.pool import Pool
from engine.loop.sequence import Sequence
from engine.step.plan import BlockCopy, StepPlan
from tests.laws.harness import _plan

BLOCK = 8


@pytest.fixture
def ledger():
    return Ledger()


def pool(ledger, rows=2, blocks=9, kv_lookahead=0, freed=None, window=None, window_blocks=None):
    allocator = bind(_plan(("kv_allocator=prefix_cache", "drafter=none"))).kv_allocator
    groups = [KVGroup(0, (0,), "full", BLOCK, blocks)]
    if window:
        groups.append(KVGroup(1, (1,), "window", BLOCK, window_blocks or blocks, window, most_blocks=5))
    allocator.start(groups)
    forget = (freed if freed is not None else []).append
    return Pool(allocator, groups, rows, BLOCK, 16, ledger, forget, kv_lookahead)


def sequence(name="r", tokens=20, other=()):
    """Of tokens that count from 0, then ``other`` ones."""
    request = EngineRequest(name, (*range(tokens), *other), SamplingParams(max_tokens=4))
    known = list(request.prompt)
    return Sequence(request, 1, 0, frozenset(), len(known) + 4, 0.0, known, BlockKeys(("m", ""), BLOCK))


def computed(pool, s):
    """Admitted, computed and committed."""
    assert pool.admit(s) and pool.grow(s, len(s.tokens))
    s.scheduled = s.computed = len(s.tokens)
    pool.commit(s)


def test_row_and_blocks_come_back_only_when_the_last_plan_that_used_them_has_retired(ledger):
    freed: list[int] = []
    p, s = pool(ledger, freed=freed), sequence()
    assert p.admit(s) and p.grow(s, 20) and (s.row_id, p.free_rows) == (0, 1)
    ledger.launched(InFlight(StepPlan(0, (), ()), (), lambda: None, 0.0, 0.0, 0, True, ()))
    s.last_plan = 0
    p.release(s)
    assert (p.free_rows, p.blocks_coming, freed) == (1, [3], []) and p.allocator.usage()[0].leased == 3
    ledger.retire()
    assert (p.free_rows, p.blocks_coming, freed) == (2, [0], [0]) and p.allocator.usage()[0].leased == 0


def test_nobody_is_admitted_without_a_row_and_nothing_is_taken_for_it(ledger):
    p = pool(ledger, rows=1)
    assert p.admit(sequence("a")) and not p.admit(sequence("b"))
    assert p.free_rows == 0


def test_an_admission_taken_back_leaves_no_trace(ledger):
    p, s = pool(ledger), sequence()
    before = p.allocator.usage()
    assert p.admit(s)
    p.withdraw(s)
    assert p.allocator.usage() == before and p.free_rows == 2 and s.lease is None and s.row_id == -1


@pytest.mark.parametrize(
    ("cached", "tokens", "other", "kv_lookahead", "hit"),
    [
        (24, 24, (), 0, 23),
        (21, 21, (), 0, 20),
        (24, 20, (), 0, 19),
        (24, 20, (7, 7, 7), 0, 20),
        (21, 21, (7, 7, 7), 0, 21),
        (24, 24, (), 1, 23),
        (24, 20, (7, 7, 7), 1, 19),
        (24, 24, (7, 7, 7), 2, 22),
        (24, 0, (7, 7, 7), 1, 0),
        (24, 1, (), 1, 0),
    ],
)
def test_a_hit_leaves_the_last_token_to_compute_and_what_a_drafter_saw_after_is_the_same(
    ledger, cached, tokens, other, kv_lookahead, hit
):
    p = pool(ledger, kv_lookahead=kv_lookahead)
    first = sequence("first", tokens=cached)
    computed(p, first)
    p.release(first)
    assert p.hit(sequence("again", tokens, other)) == hit
    again = sequence("again", tokens, other)
    assert p.admit(again) and again.computed == again.scheduled == hit
    assert len(again.copies) == (hit % BLOCK > 0)


def test_a_hit_inside_of_a_block_names_the_copy_once(ledger):
    p, first, again = pool(ledger), sequence("first", tokens=21), sequence("again", tokens=21)
    computed(p, first)
    blocks = list(first.lease.blocks[0])
    p.release(first)
    assert p.admit(again)
    copies = (BlockCopy(0, blocks[2], again.lease.blocks[0][2]),)
    assert again.lease.blocks[0][:2] == blocks[:2] and copies[0].target not in blocks
    assert again.admission().copies == copies
    again.roll_back()
    assert again.admission().copies == () and again.computed == 20


def test_a_copy_that_no_plan_has_made_is_forgotten_with_the_admission(ledger):
    p, first, again = pool(ledger), sequence("first", tokens=21), sequence("again", tokens=21)
    computed(p, first)
    p.release(first)
    before = p.allocator.usage()
    assert p.admit(again) and again.copies
    p.withdraw(again)
    assert again.copies == () and p.allocator.usage() == before
    assert p.hit(sequence("third", tokens=21)) == 20


def test_blocks_that_are_coming_count_as_not_missing(ledger):
    p, a, b = pool(ledger, blocks=5), sequence("a"), sequence("b", tokens=25)
    assert p.admit(a) and p.grow(a, 20) and p.admit(b)
    assert p.missing(b, 25)
    ledger.launched(InFlight(StepPlan(0, (), ()), (), lambda: None, 0.0, 0.0, 0, True, ()))
    a.last_plan = 0
    p.release(a)
    assert not p.missing(b, 25) and not p.grow(b, 25)
    ledger.retire()
    assert p.grow(b, 25)


def test_of_a_group_with_a_window_a_long_prompt_needs_no_more_than_a_window_and_a_step(ledger):
    p, s = pool(ledger, blocks=100, window=16), sequence(tokens=400)
    assert p.needed(s, 0, 8) == (1, 1) and p.needed(s, 0, 16) == (2, 2)
    assert p.needed(s, 0, 400) == (50, 5)
    assert p.needed(s, 24, 8) == (4, 3), "of 24 cached tokens one block is passed"
    assert p.admit(s) and p.grow(s, 24)
    assert p.needed(s, 0, 400) == (47, 2), "three of five are held"


def test_blocks_that_a_window_passes_when_steps_retire_are_not_missing(ledger):
    p, s = pool(ledger, blocks=20, window=8, window_blocks=6), sequence(tokens=48)
    assert p.admit(s) and p.grow(s, 40) and not p.grow(s, 64)
    assert p.missing(s, 64), "of the window's five blocks none will be passed"
    s.scheduled = 40
    assert not p.missing(s, 64) and not p.grow(s, 64)
    s.computed = 40
    p.commit(s)
    assert p.grow(s, 64)


def test_what_a_window_has_passed_is_given_back_by_a_commit(ledger):
    p, s = pool(ledger, window=8), sequence(tokens=40)
    assert p.admit(s) and p.grow(s, 40) and p.held(s) == (5, 5)
    s.scheduled = s.computed = 40
    p.commit(s)
    assert p.held(s) == (5, 1) and s.lease.blocks[1][:4] == [0] * 4
    p.release(s)
    assert [usage.leased for usage in p.allocator.usage()] == [0, 0]
