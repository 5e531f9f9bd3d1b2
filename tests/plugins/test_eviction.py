"""Which item makes way where some are retained."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from engine.testing.simulation import VirtualClock
from engine_plugins.eviction import MOST_RETAINED, EvictionOrder

MINE, THEIRS = b"mine", b"theirs"


def drained(order: EvictionOrder[int]) -> list[int]:
    return [order.pop() for _ in range(len(order))]


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_what_an_owner_retains_costs_others_nothing(seed: int, room: int) -> None:
    random, clock = Random(seed), VirtualClock()
    order: EvictionOrder[int] = EvictionOrder(room, clock)
    plain: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
    for item in range(60):
        clock.now += random.choice((0.0, 1.0, 40.0))
        owner = random.choice((MINE, THEIRS))
        if len(plain) == room:
            order.pop()
            plain.popitem(last=False)
        order.add(item, owner)
        plain[item] = owner
        if owner == MINE and random.random() < 0.7:
            order.retain(item, random.choice((30.0, 300.0)))
        again = random.choice([each for each in plain if each in order])
        order.add(again, plain[again])
        plain.move_to_end(again)
        theirs = {each for each in plain if plain[each] == THEIRS}
        assert theirs == {each for each in order if order._owner_of[each] == THEIRS}
        assert len(order) == len(plain), "an owner has as many items as without retention"


def test_what_is_retained_goes_last_until_it_was_not_used_for_so_long() -> None:
    clock = VirtualClock()
    order: EvictionOrder[int] = EvictionOrder(8, clock)
    for item in range(4):
        order.add(item, MINE)
    order.retain(0, 300.0)
    order.retain(1, 3600.0)
    clock.now = 299.0
    order.add(0, MINE)  # used again
    clock.now = 598.0
    order.add(4, MINE)
    assert drained(order) == [2, 3, 4, 0, 1]
    for item in range(3):
        order.add(item, MINE)
    order.retain(0, 300.0)
    clock.now += 301.0
    order.add(3, MINE)
    assert order.pop() == 1 and order.pop() == 2 and order.pop() == 3, "it lapsed just now, as if it were used then"
    order.take(0)
    order.add(0, MINE)
    order.add(4, MINE)
    assert drained(order) == [0, 4], "it was used again too late"


def test_an_owner_retains_a_share_and_no_more() -> None:
    clock = VirtualClock()
    order: EvictionOrder[int] = EvictionOrder(8, clock)
    for item in range(8):
        clock.now += 1.0
        order.add(item, MINE)
        order.retain(item, 300.0)
    most = int(8 * MOST_RETAINED)
    assert drained(order) == list(range(8)), "the first half has lapsed"
    for item in range(8):
        clock.now += 1.0
        order.add(item, MINE)
        order.retain(item, 300.0)
    order.add(9, MINE)
    assert [order.pop() for _ in range(8 - most + 1)] == [*range(8 - most), 9]
