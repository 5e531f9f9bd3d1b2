"""Records that are lent stay where they are, and memory keeps room for others."""

from __future__ import annotations

from engine.contracts.kv_store import RecordLayout
from engine.kv.checked_memory import CheckedMemory
from engine.loop.lending import MOST_LENT, Lending
from engine.testing.context import build_context
from engine_plugins.kv_store.host import HostConfig, HostStore

SIZE, SLOTS = 1 << 16, 16


def test_a_lent_record_stays_until_it_was_given_back_once() -> None:
    store = HostStore(HostConfig(max_bytes=SLOTS * SIZE), build_context())
    store.open(RecordLayout(bytes(32), (SIZE,)), lambda: None)
    memory = CheckedMemory(store, [SIZE])
    lending = Lending(memory, [SIZE])

    def add(number: int) -> int | None:
        slot = memory.room(0, bytes([number]))
        if slot is not None:
            memory.memory(0)[slot * SIZE : (slot + 1) * SIZE] = bytes([number]) * SIZE
            memory.publish(0, slot)
        return slot

    for number in range(SLOTS):
        add(number)
    assert lending.lend(0, b"?") is None and not lending.has(0, b"?")
    most = int(MOST_LENT * SLOTS)
    loans = [lending.lend(0, bytes([number])) for number in range(SLOTS)]
    assert [loan is not None for loan in loans] == [True] * most + [False] * (SLOTS - most)
    assert all(add(number) is not None for number in range(SLOTS, 5 * SLOTS)), "there is no room beside lent records"
    for number, loan in enumerate(loans[:most]):
        assert loan is not None and loan.record.readonly
        assert loan.record == bytes([number]) * SIZE, "a lent record was changed"
        loan.give_back()
        loan.give_back()
    assert lending.lend(0, bytes([0])) is not None, "what was lent is counted for ever"
    for number in range(SLOTS):
        add(number)
    store.clear()
    assert lending.lend(0, bytes([0])) is None
