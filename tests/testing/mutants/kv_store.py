"""Bugs planted into KV stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.cli.plugins.templates.kv_store.plugin import MineStore, MineStoreConfig
from engine.contracts.kv_store import RecordId, RecordLayout
from engine.testing.context import build_context
from engine.testing.kv_store import KVStoreConformance
from engine_plugins.kv_store.disk import DiskConfig, DiskStore
from engine_plugins.kv_store.host import HostConfig, HostStore
from engine_plugins.kv_store.peer.store import PeerConfig, PeerStore
from engine_plugins.kv_store.segment import Origin, Others, Segment
from tests.addresses import free_addresses
from tests.testing.mutants.mutant import OnPlugin, mutant


class Suite(OnPlugin, KVStoreConformance):
    def make(self) -> Any:
        config = HostConfig(max_bytes=1 << 20) if issubclass(self.plugin, HostStore) else MineStoreConfig()
        return self.plugin(config, build_context())


class OfPeers(OnPlugin, KVStoreConformance):
    """Its stores find each other at four addresses."""

    def make(self) -> Any:
        if not hasattr(self, "peers"):
            self.peers = free_addresses(4)
            self.folder = tempfile.TemporaryDirectory()
            Path(self.folder.name, "token").write_text("t" * 32)
        return self.plugin(PeerConfig(self.peers, token_file=f"{self.folder.name}/token"), build_context())


@mutant(Suite, "test_a_missing_record_ends_what_is_found")
class HasAll(MineStore):
    """Has every record once it has any."""

    def has(self, group: int, key: bytes) -> bool:
        return bool(self._records)


@mutant(Suite, "test_groups_of_one_block_are_different_records")
class ByKeyAlone(MineStore):
    """Has one record for a block, whatever the group."""

    def has(self, group: int, key: bytes) -> bool:
        return super().has(0, key)

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


@mutant(Suite, "test_a_bound_counts_what_all_ranks_have")
class CountsOneRank(HostStore):
    """Has as many slots as if there were no other rank."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        super().open(replace(layout, all_ranks=()), wake)


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


@mutant(Suite, "test_slots_lie_in_the_file_where_other_ranks_look_for_them")
class SlotsElsewhere(HostStore):
    """Has other ranks look where its headers are."""

    def slot_offsets(self) -> Sequence[int]:
        return [offset - 4096 for offset in super().slot_offsets()]


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


@mutant(Suite, "test_an_engine_finds_what_the_one_before_it_left")
class TakesOverNothing(HostStore):
    """Does not look at what an earlier engine has left."""

    def _take_over(self, segment: Segment) -> None: ...


@mutant(Suite, "test_an_engine_finds_what_the_one_before_it_left")
class LeavesWhatIsOverwritten(HostStore):
    """Leaves the header of a slot that is given out."""

    def room(self, group: int, key: bytes) -> int | None:
        segment, self._segment = self._segment, None
        slot = super().room(group, key)
        self._segment = segment
        if slot is not None and segment is not None:
            segment.publish(group, slot, key)
        return slot


class Trusting(Others):
    def _copy(self, each: RecordId, buffer: memoryview) -> Origin | None:
        if (found := self._find(each)) is None:
            return None
        number, mapped, slot = found
        os.preadv(self._files[number], [buffer], self._shape.record(slot)[0])
        return number, mapped.epoch


@mutant(Suite, "test_a_record_that_another_engine_has_changed_is_missed")
class ChecksNoCopy(HostStore):
    """Takes what another engine has as it comes."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        super().open(layout, wake)
        if self._others is not None:
            self._others.__class__ = Trusting


@mutant(Suite, "test_no_engine_finds_what_another_has_cleared")
class ClearsForItself(HostStore):
    """Forgets its records, and leaves them to others."""

    def clear(self) -> None:
        segment, self._segment = self._segment, None
        super().clear()
        self._segment = segment


class Silent(Others):
    def forgot(self) -> bool:
        return False


@mutant(Suite, "test_no_engine_finds_what_another_has_cleared")
class SaysNothingOfWhatOthersForgot(HostStore):
    """Leaves what was computed from records that another engine has cleared."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        super().open(layout, wake)
        if self._others is not None:
            self._others.__class__ = Silent


class OfDisk(OnPlugin, KVStoreConformance):
    def make(self) -> Any:
        self.folder = tempfile.TemporaryDirectory()
        return self.plugin(DiskConfig(path=self.folder.name, max_bytes=1 << 20), build_context())


@mutant(OfDisk, "test_what_a_tenant_retains_goes_after_its_others_and_locks_nothing")
class RetainsNothing(DiskStore):
    """Evicts by last use alone."""

    def retain(self, tenant: bytes, group: int, keys: Sequence[bytes], seconds: float) -> None: ...


@mutant(OfDisk, "test_what_a_tenant_retains_goes_after_its_others_and_locks_nothing")
class LocksFiles(DiskStore):
    """Keeps what is retained in spite of newer records."""

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        kept = sum([kept.size for kept in self._index.values() if kept.seconds])
        return kept < self._most_bytes // 2 and super().put(group, key, record, done)


@mutant(OfPeers, "test_what_another_memory_has_lost_is_a_miss_and_all_that_was_lent_comes_back")
class Believes(PeerStore):
    """Goes on saying that another engine has what it has not."""

    def has(self, group: int, key: bytes) -> bool:
        ever: set[RecordId] = self.__dict__.setdefault("ever", set())
        if super().has(group, key):
            ever.add((group, key))
        return (group, key) in ever


@mutant(OfPeers, "test_a_missing_record_ends_what_is_found")
class AsksBackwards(PeerStore):
    """Reads the last record first, and counts from there."""

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        return super().get(ids[::-1], into[::-1])
