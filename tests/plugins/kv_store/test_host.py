"""Records in memory of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contracts.config import FleetSettings
from engine.contracts.kv_store import RecordLayout
from engine.testing.context import build_context
from engine.testing.kv_store import KVStoreConformance
from engine.testing.simulation import VirtualClock
from engine_plugins.kv_store.host import HostConfig, HostStore


def opened(slots: int = 4) -> HostStore:
    """With so many slots of a group, and nobody to wake."""
    store = HostStore(HostConfig(max_bytes=1 << 20), build_context())
    store.open(RecordLayout(bytes(32), ((1 << 20) // slots,)), lambda: None)
    return store


def add(store: HostStore, key: bytes) -> int:
    slot = store.room(0, key)
    assert slot is not None
    store.publish(0, slot)
    return slot


class TestConformance(KVStoreConformance):
    def make(self) -> HostStore:
        return HostStore(HostConfig(max_bytes=1 << 20), build_context())


def test_the_least_recently_used_makes_way_and_of_a_text_its_end() -> None:
    store, keys = opened(), [b"a0", b"a1", b"b0", b"b1"]
    slots = [add(store, key) for key in keys]
    store.use(0, slots[:2])
    for key, gone in ((b"c0", b"b0"), (b"c1", b"b1"), (b"c2", b"a1"), (b"c3", b"a0")):
        add(store, key)
        assert store.find(0, gone) is None
        store.check()
    assert store.usage().evicted == 4


def test_what_a_tenant_retains_goes_after_its_others_and_costs_nobody_else_anything() -> None:
    clock = VirtualClock()
    store = HostStore(HostConfig(max_bytes=1 << 20), replace(build_context(), clock=clock))
    store.open(RecordLayout(bytes(32), ((1 << 20) // 6,)), lambda: None)
    mine = [add(store, key) for key in (b"a0", b"a1")]
    theirs, later = add(store, b"b0"), [add(store, key) for key in (b"a2", b"a3", b"a4")]
    store.retain(b"mine", 0, mine, 300.0)
    store.retain(b"theirs", 0, [theirs], 0.0)
    store.retain(b"mine", 0, later[:1], 0.0)
    store.hold(0, later[2:])
    store.use(0, later[1:])
    found = []
    for number in range(4):
        before = list(store._groups[0].slot_of)
        add(store, b"c%d" % number)
        found += [key for key in before if store.find(0, key) is None]
        store.check()
    assert found == [b"a2", b"a1", b"b0", b"a0"], "by use it were a1, a0, b0, a2, and then what is held"


def test_a_record_that_came_twice_is_there_once() -> None:
    store = opened()
    first, second = store.room(0, b"a"), store.room(0, b"a")
    assert first is not None and second is not None
    store.publish(0, first)
    store.publish(0, second)
    store.check()
    assert store.find(0, b"a") == first and store.usage().records == 1


def test_a_held_record_that_was_forgotten_keeps_its_slot_until_it_is_let_go() -> None:
    store = opened(slots=1)
    slot = add(store, b"a")
    store.hold(0, [slot])
    store.clear()
    store.check()
    assert store.room(0, b"b") is None
    store.let_go(0, [slot])
    store.check()
    assert store.room(0, b"b") == slot


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_store\.host\.max_bytes=5"):
        HostConfig(max_bytes=5)


def test_engines_of_a_server_share_out_what_is_for_all() -> None:
    context = build_context()
    both = replace(context, settings=replace(context.settings, fleet=FleetSettings(replicas=2)))
    assert HostStore(HostConfig(max_bytes=1 << 20), both).most_bytes == 1 << 19
