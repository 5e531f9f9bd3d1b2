"""What a memory store may not answer is reported before anything is copied."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contracts.kv_store import RecordLayout
from engine.kv.checked_memory import CheckedMemory
from engine.plugin_guard.calls import PluginError
from engine.testing.context import build_context
from engine_plugins.kv_store.host import HostConfig, HostStore

SIZE, SLOTS = 1 << 18, 4


@pytest.fixture
def memory() -> CheckedMemory:
    store = HostStore(HostConfig(max_bytes=SLOTS * SIZE), build_context())
    store.open(RecordLayout(bytes(32), (SIZE,)), lambda: None)
    return CheckedMemory(store, [SIZE])


def add(memory: CheckedMemory, key: bytes) -> int:
    slot = memory.room(0, key)
    assert slot is not None
    memory.publish(0, slot)
    return slot


def test_an_honest_store_is_not_accused(memory: CheckedMemory) -> None:
    for number in range(3 * SLOTS):
        key = bytes([number])
        slot = add(memory, key)
        assert memory.found(0, key) == slot
        memory.hold(0, [slot])
        memory.let_go(0, [slot])
        twice = memory.room(0, key)
        assert twice is not None
        memory.publish(0, twice)
        assert memory.found(0, key) == slot
        gone = memory.room(0, b"never")
        assert gone is not None
        memory.abandon(0, gone)


@pytest.mark.parametrize("slot", [SLOTS, -1, "0", True, 1.0])
def test_a_slot_that_does_not_exist(memory: CheckedMemory, slot: Any) -> None:
    memory.store.room = lambda group, key: slot  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"HostStore: room\(\) returned slot .* expected 0 to 3 or None"):
        memory.room(0, b"a")
    memory.find = lambda group, key: slot  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"HostStore: find\(\) returned slot .* holds another record"):
        memory.found(0, b"a")


def test_room_where_something_is_held_or_written(memory: CheckedMemory) -> None:
    held, coming = add(memory, b"held"), memory.room(0, b"coming")
    memory.hold(0, [held])
    for used in (held, coming):
        memory.store.room = lambda group, key, used=used: used  # type: ignore[method-assign, misc]
        with pytest.raises(PluginError, match=rf"room\(\) returned slot {used} of group 0, which is in use"):
            memory.room(0, b"new")


def test_a_slot_that_holds_another_record_or_is_being_written(memory: CheckedMemory) -> None:
    other, coming = add(memory, b"other"), memory.room(0, b"coming")
    for wrong in (other, coming):
        memory.find = lambda group, key, wrong=wrong: wrong  # type: ignore[method-assign, misc]
        with pytest.raises(PluginError, match=rf"find\(\) returned slot {wrong} of group 0, which holds another"):
            memory.found(0, b"mine")


def test_a_record_that_is_gone_the_moment_it_is_needed(memory: CheckedMemory) -> None:
    with pytest.raises(PluginError, match=r"find\(\) does not find a record that it found just now"):
        memory.found(0, b"gone")
