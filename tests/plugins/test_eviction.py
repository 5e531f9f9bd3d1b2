"""Which item makes way where some are retained."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from engine.testing.simulation import VirtualClock
from engine_plugins.eviction import MOST_RETAINED, EvictionOrder, _Retaining

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
            theirs = [each for each in plain if plain[each] == THEIRS]
            held = {random.choice(theirs)} if theirs and room > 1 and random.random() < 0.3 else set()
            order.pop(held)
            del plain[next(each for each in plain if each not in held)]
        order.add(item, owner)
        plain[item] = owner
        if owner == MINE and random.random() < 0.7:
            order.retain(item, random.choice((30.0, 300.0)))
        again = random.choice([each for each in plain if each in order])
        order.add(again, plain[again])
        plain.move_to_end(again)
        theirs = {each for each in plain if plain[each] == THEIRS}
        assert theirs == {each for each in order if order.owner_of(each) == THEIRS}
        assert len(order) == len(plain), "an owner has as many items as without retention"


@given(st.integers(0, 10**6))
def test_it_is_the_same_order_while_nothing_is_retained(seed: int) -> None:
    """The order of before and after against one that knows of retention all the time."""
    random, clock = Random(seed), VirtualClock()
    order: EvictionOrder[int] = EvictionOrder(8, clock)
    other: _Retaining[int] = _Retaining(int(8 * MOST_RETAINED), clock)
    for _ in range(100):
        clock.now += random.choice((0.0, 1.0, 40.0))
        item = random.randrange(8)
        match random.choice(("add", "add", "add", "add", "take", "first", "pop", "pop", "retain")):
            case "add":
                owner = MINE if item % 2 else THEIRS
                order.add(item, owner)
                other.add(item, owner)
            case "take":
                order.take(item)
                other.take(item)
            case "first" if item in order:
                order.first(item)
                other.first(item)
            case "pop":
                held = {*range(random.randrange(3))}
                assert order.pop(held) == other.pop(held)
            case "retain" if item in order and random.random() < 0.3:
                order.retain(item, 30.0)
                other.retain(item, 30.0)
        assert [*order] == [*other.items.values()]


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
