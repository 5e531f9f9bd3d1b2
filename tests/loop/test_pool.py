import pytest

from engine.assembly.bind import bind
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.block_keys import BlockKeys
from engine.loop.ledger import InFlight, Ledger
from engine.loop.pool import Pool
from engine.loop.sequence import Sequence
from engine.step.plan import StepPlan
from tests.laws.harness import _plan

BLOCK = 8


@pytest.fixture
def ledger():
    return Ledger()


def pool(ledger, rows=2, blocks=9, gives_up_last_block=False, freed=None):
    allocator = bind(_plan(("kv_allocator=prefix_cache", "drafter=none"))).kv_allocator
    allocator.start([KVGroup(0, (0,), "full", BLOCK)], blocks)
    return Pool(allocator, rows, BLOCK, ledger, (freed if freed is not None else []).append, gives_up_last_block)


def sequence(name="r", tokens=20):
    request = EngineRequest(name, tuple(range(tokens)), SamplingParams(max_tokens=4))
    return Sequence(request, 1, 0, frozenset(), tokens + 4, 0.0, list(request.prompt), BlockKeys(("m", ""), BLOCK))


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
    assert (p.free_rows, p.blocks_coming, freed) == (1, 3, []) and p.allocator.usage().leased == 3
    ledger.retire()
    assert (p.free_rows, p.blocks_coming, freed) == (2, 0, [0]) and p.allocator.usage().leased == 0


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


def test_a_hit_leaves_the_last_token_to_compute_and_a_block_more_for_a_drafter_that_looks_ahead(ledger):
    for gives_up, hit in ((False, 16), (True, 8)):
        p = pool(ledger, gives_up_last_block=gives_up)
        first = sequence("first", tokens=24)
        computed(p, first)
        p.release(first)
        assert p.hit(sequence("again", tokens=24)) == hit
        again = sequence("again", tokens=24)
        assert p.admit(again) and again.computed == again.scheduled == hit


def test_blocks_that_are_coming_count_as_not_missing(ledger):
    p, a, b = pool(ledger, blocks=5), sequence("a"), sequence("b", tokens=25)
    assert p.admit(a) and p.grow(a, 20) and p.admit(b)
    assert p.missing(b, 25) == 3
    ledger.launched(InFlight(StepPlan(0, (), ()), (), lambda: None, 0.0, 0.0, 0, True, ()))
    a.last_plan = 0
    p.release(a)
    assert p.missing(b, 25) == 0 and not p.grow(b, 25)
    ledger.retire()
    assert p.grow(b, 25)
