"""Bugs planted into KV stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.cli.plugins.templates.kv_store.plugin import MineStore, MineStoreConfig
from engine.contracts.kv_store import RecordLayout
from engine.testing.context import build_context
from engine.testing.kv_store import KVStoreConformance
from engine_plugins.kv_store.host import HostConfig, HostStore
from tests.testing.mutants.mutant import OnPlugin, mutant

RecordId = tuple[int, bytes]


class Suite(OnPlugin, KVStoreConformance):
    def make(self) -> Any:
        config = HostConfig(max_bytes=1 << 20) if issubclass(self.plugin, HostStore) else MineStoreConfig()
        return self.plugin(config, build_context())


@mutant(Suite, "test_a_missing_record_ends_what_is_found")
class CountsAll(MineStore):
    """Counts records after one that is missing."""

    def count(self, ids: Sequence[RecordId]) -> int:
        return sum(each in self._records for each in ids)


@mutant(Suite, "test_groups_of_one_block_are_different_records")
class ByKeyAlone(MineStore):
    """Has one record for a block, whatever the group."""

    def count(self, ids: Sequence[RecordId]) -> int:
        return super().count([(0, key) for _, key in ids])

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        return super().put(0, key, record, done)


@mutant(Suite, "test_bytes_may_be_changed_once_it_is_done")
class Borrows(MineStore):
    """Keeps the caller's bytes, and says that it is done with them."""

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        self._records[group, key] = record  # type: ignore[assignment]
        done()
        return True


@mutant(Suite, "test_what_was_put_is_got_back")
class NeverWakes(MineStore):
    """Does not say that a read has ended."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        super().open(layout, lambda: None)


@mutant(Suite, "test_a_missing_record_ends_what_is_found", "test_what_was_put_is_got_back")
class CountsTheLost(MineStore):
    """Says of every read that all of it came."""

    def _read(self, job: int, ids: Sequence[RecordId], into: Sequence[memoryview]) -> None:
        self._ended.put((job, len(ids)))
        self._wake()


@mutant(Suite, "test_another_namespace_finds_nothing")
class OneForAll(MineStore):
    """Has the same records for every model."""

    _every: dict[RecordId, bytes] = {}  # noqa: RUF012 - that is the bug

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        super().open(layout, wake)
        self._records = self._every


@mutant(Suite, "test_nothing_is_found_after_clear")
class KeepsTheIndex(MineStore):
    """Forgets bytes, and not that they were there."""

    def clear(self) -> None:
        self._taken = 0


@mutant(Suite, "test_records_are_found_where_they_were_written")
class FoundTooSoon(HostStore):
    """Finds a record that is being written."""

    def room(self, group: int, key: bytes) -> int | None:
        slot = super().room(group, key)
        if slot is not None:
            self._groups[group].slot_of[key] = slot
            self._groups[group].key_of[slot] = key
        return slot


@mutant(Suite, "test_held_records_stay_whatever_comes")
class HoldsOnce(HostStore):
    """Takes two holds for one."""

    def hold(self, group: int, slots: Sequence[int]) -> None:
        self._groups[group].holds.update(dict.fromkeys(slots, 1))


@mutant(Suite, "test_what_is_retained_locks_nothing")
class LocksTheRetained(HostStore):
    """Never evicts a record that is retained."""

    def retain(self, tenant: bytes, group: int, slots: Sequence[int], seconds: float) -> None:
        super().retain(tenant, group, slots, seconds)
        self.hold(group, slots)


@mutant(Suite, "test_an_abandoned_slot_is_free_again")
class LosesSlots(HostStore):
    """Never gives an abandoned slot out again."""

    def abandon(self, group: int, slot: int) -> None:
        del self._groups[group].filling[slot]


@mutant(Suite, "test_nothing_in_memory_is_found_after_clear")
class PublishesTheOld(HostStore):
    """Publishes what was being written when everything was to be forgotten."""

    def clear(self) -> None:
        filling = [dict(own.filling) for own in self._groups]
        super().clear()
        for own, before in zip(self._groups, filling, strict=True):
            own.filling = before
