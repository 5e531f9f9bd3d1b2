"""A segment: records in a file in memory that outlives the engine which writes them, and that other engines read.

In it lie a page that says what there is, a table of slots by key, a header of 64 bytes for each slot, and the slots,
group by group. One engine writes, and nobody waits for anybody: who reads copies a record, and then sees whether its
header is what it was and its checksum right. What is not is a miss.

A slot's header names the epoch of the segment in which it was written. That word is 0 while the slot is being written,
and is written last: a writer that is killed leaves no record. With a new epoch all records of a segment are forgotten
at once, by every reader. Records are numbered, too, so that a reader can forget those that are there at a moment.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue

from engine.contracts.kv_store import RecordId, RecordLayout, StoreUsage

MAGIC, FORMAT = b"EKVS", 1
PAGE = mmap.PAGESIZE
ABOUT = struct.Struct("=4sHHQ32s")
"""Magic, format, number of groups, slots of each, namespace; then of each group the bytes of a record."""
EPOCH, LAST = 256, 257
"""Words of 8 bytes in the first page: the epoch, 0 while nothing is sure, and the number of the last record."""
HEADER = struct.Struct("=QQ32sIIHH4s")
"""Epoch, number, key, length, CRC-32 of the namespace, the other fields and the record, group, format, magic."""
WIDTH = 8
"""Slots that the table names under one hash. Of more, one is lost to other engines for each."""
MOST = 2**62
"""An epoch or number beyond it was not written by this program."""
CHECKERS = 8
READERS = 2

Origin = tuple[int, int]
"""Of a copy: the number of the segment, and its epoch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where what lies in a segment."""

    layout: RecordLayout
    slots: int
    """Of each group."""

    @property
    def about(self) -> bytes:
        sizes = self.layout.num_bytes
        about = ABOUT.pack(MAGIC, FORMAT, len(sizes), self.slots, self.layout.namespace)
        return about + struct.pack(f"={len(sizes)}Q", *sizes)

    @property
    def num_slots(self) -> int:
        """Of all groups: those of the first come first."""
        return self.slots * len(self.layout.num_bytes)

    @property
    def buckets(self) -> int:
        return self.num_slots // 2 + 1

    @property
    def headers(self) -> int:
        return _pages(PAGE + self.buckets * WIDTH * 4)

    @property
    def records(self) -> tuple[int, ...]:
        """By group: where its first slot begins; then where the last group ends."""
        found = [_pages(self.headers + self.num_slots * HEADER.size)]
        for size in self.layout.num_bytes:
            found.append(_pages(found[-1] + self.slots * size))
        return tuple(found)

    def record(self, slot: int) -> tuple[int, int]:
        """Where a record begins, and its bytes; ``slot``: its number among those of all groups."""
        group, at = divmod(slot, self.slots)
        size = self.layout.num_bytes[group]
        return self.records[group] + at * size, size


class Mapped:
    """A segment in the memory of this process: all of it, or what lies before the records."""

    def __init__(self, file: int, shape: Shape, writes: bool) -> None:
        self.shape = shape
        access = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        self.memory = mmap.mmap(file, shape.records[-1 if writes else 0], mmap.MAP_SHARED, access)
        self.everything = everything = memoryview(self.memory)
        self.words = everything[:PAGE].cast("Q")
        self._headers = everything[shape.headers : shape.headers + shape.num_slots * HEADER.size]
        self.marks = self._headers.cast("Q")
        """The words of all headers: of each the first is its epoch."""
        self.table = everything[PAGE : PAGE + shape.buckets * WIDTH * 4].cast("I")
        """Numbers of slots, from 1 on, in buckets by hash."""
        self._about, self._buckets = shape.about, shape.buckets

    @property
    def epoch(self) -> int:
        return self.words[EPOCH]

    @property
    def is_as_expected(self) -> bool:
        return self.memory[: len(self._about)] == self._about

    def header(self, slot: int) -> bytes:
        return bytes(self._headers[slot * HEADER.size : (slot + 1) * HEADER.size])

    def write_header(self, slot: int, header: bytes) -> None:
        at = slot * HEADER.size
        self._headers[at + 8 : at + HEADER.size] = header[8:]
        self.marks[at // 8] = int.from_bytes(header[:8], sys.byteorder)

    def record(self, slot: int) -> memoryview:
        begin, size = self.shape.record(slot)
        return self.everything[begin : begin + size]

    def bucket(self, key: bytes) -> int:
        """Where it begins in the table."""
        return int.from_bytes(key[:8], "little") % self._buckets * WIDTH

    def find(self, each: RecordId, after: int = 0) -> int | None:
        """The slot of a record whose number is greater than ``after``."""
        group, key = each
        epoch, at = self.words[EPOCH], self.bucket(key)
        for entry in self.table[at : at + WIDTH].tolist():
            slot = entry - 1
            if slot < 0 or slot // self.shape.slots != group:
                continue
            begin = slot * HEADER.size
            if self._headers[begin + 16 : begin + 48] != key or self.marks[begin // 8] != epoch or not epoch:
                continue
            if self.marks[begin // 8 + 1] > after:
                return slot
        return None


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def header_of(shape: Shape, epoch: int, number: int, each: RecordId, record: memoryview) -> bytes:
    group, key = each
    blank = HEADER.pack(epoch, number, key, len(record), 0, group, FORMAT, MAGIC)
    checksum = zlib.crc32(record, zlib.crc32(shape.layout.namespace + blank))
    return HEADER.pack(epoch, number, key, len(record), checksum, group, FORMAT, MAGIC)


class Segment:
    """The segment that this engine writes to. A thread of its own makes checksums: a record is found by others, and
    after this process, once it has its header."""

    def __init__(self, file: int, shape: Shape) -> None:
        self.shape = shape
        size = shape.records[-1]
        os.ftruncate(file, max(size, os.fstat(file).st_size))
        self._mapped = mapped = Mapped(file, shape, writes=True)
        begins, sizes = shape.records, shape.layout.num_bytes
        self.groups = [mapped.everything[at : at + shape.slots * size] for at, size in zip(begins, sizes, strict=False)]
        self._is_new = not mapped.is_as_expected or max(mapped.epoch, mapped.words[LAST]) > MOST
        if self._is_new:
            self._begin_anew(file)
        self._last = mapped.words[LAST]
        """Number of the last record, whatever becomes of the word."""
        self._lock = threading.Lock()
        """Of headers and epoch."""
        self._writes = [0] * shape.num_slots
        """How often each slot was given out."""
        self._coming: SimpleQueue[tuple[int, RecordId, int, int] | None] = SimpleQueue()
        self._sealing = threading.Thread(target=self._seal, name="kv-seal", daemon=True)
        self._sealing.start()

    def _begin_anew(self, file: int) -> None:
        """For another namespace or other sizes: nothing of what was there stays."""
        mapped = self._mapped
        last = min(mapped.words[LAST], MOST // 2)
        mapped.words[EPOCH] = 0
        mmap.mmap(file, os.fstat(file).st_size).madvise(mmap.MADV_REMOVE)  # zeros are read there, and no memory taken
        about = self.shape.about
        mapped.memory[: len(about)] = about
        mapped.words[LAST] = last
        mapped.words[EPOCH] = _new_epoch()

    def found(self) -> tuple[list[tuple[int, int, bytes]], int]:
        """Group, slot and key of the records that an earlier engine has left, oldest first, all of them checked; and
        how many were damaged."""
        mapped, slots = self._mapped, self.shape.slots
        if self._is_new:
            return [], 0  # to look at its headers would take their memory
        there = [slot for slot in range(self.shape.num_slots) if mapped.marks[slot * 8] == mapped.epoch]
        parts = min(CHECKERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(parts) as checkers:
            good = {
                slot for part in checkers.map(self._good, [there[at::parts] for at in range(parts)]) for slot in part
            }
        for slot in there:
            if slot not in good:
                mapped.marks[slot * 8] = 0
        mapped.table[:] = memoryview(bytes(len(mapped.table) * 4)).cast("I")
        found: list[tuple[int, int, int, bytes]] = []
        for slot in good:
            _, number, key, *_ = HEADER.unpack(mapped.header(slot))
            group, at = divmod(slot, slots)
            found.append((number, group, at, key))
            self._enter(slot, (group, key))
        return [(group, slot, key) for _, group, slot, key in sorted(found)], len(there) - len(found)

    def _good(self, slots: Sequence[int]) -> list[int]:
        """Those whose records are whole."""
        return [slot for slot in slots if self._is_good(slot)]

    def _is_good(self, slot: int) -> bool:
        header = self._mapped.header(slot)
        epoch, number, key, _, _, group, *_ = HEADER.unpack(header)
        if group != slot // self.shape.slots:
            return False
        return header_of(self.shape, epoch, number, (group, key), self._mapped.record(slot)) == header

    def begin(self, group: int, slot: int) -> None:
        """What is in this slot is no record any more."""
        slot += group * self.shape.slots
        with self._lock:
            self._writes[slot] += 1
            self._mapped.marks[slot * 8] = 0

    def publish(self, group: int, slot: int, key: bytes) -> None:
        """Its record is whole."""
        slot += group * self.shape.slots
        self._coming.put((slot, (group, key), self._writes[slot], self._mapped.epoch))

    def _seal(self) -> None:
        mapped = self._mapped
        while (coming := self._coming.get()) is not None:
            slot, each, writes, epoch = coming
            if self._writes[slot] != writes:
                continue
            number = self._last + 1
            header = header_of(self.shape, epoch, number, each, mapped.record(slot))
            with self._lock:
                if self._writes[slot] == writes and mapped.epoch == epoch:
                    mapped.words[LAST] = self._last = number
                    mapped.write_header(slot, header)
                    self._enter(slot, each)

    def _enter(self, slot: int, each: RecordId) -> None:
        """Into the table, instead of what is not there any more."""
        mapped, at = self._mapped, self._mapped.bucket(each[1])
        for entry in range(at, at + WIDTH):
            other = mapped.table[entry] - 1
            if other in (-1, slot) or not self._is_entered(other, at):
                mapped.table[entry] = slot + 1
                return
        mapped.table[at] = slot + 1

    def _is_entered(self, slot: int, bucket: int) -> bool:
        """Whether the table needs it in this bucket."""
        if slot >= self.shape.num_slots:  # nothing that an engine writes
            return False
        epoch, _, key, *_ = HEADER.unpack(self._mapped.header(slot))
        return bool(epoch) and epoch == self._mapped.epoch and self._mapped.bucket(key) == bucket

    def forget(self) -> None:
        """All records, those that have no header yet included."""
        with self._lock:
            self._mapped.words[EPOCH] = _new_epoch()

    def close(self, deadline_s: float) -> None:
        """End what is being written."""
        self._coming.put(None)
        self._sealing.join(deadline_s)


def _new_epoch() -> int:
    return secrets.randbelow(MOST) + 1


class Others:
    """The records in the segments of other engines. See :class:`engine.contracts.kv_store.OtherEngines`."""

    def __init__(self, files: Sequence[int], shape: Shape, tidy: Callable[[], None]) -> None:
        """``tidy``: called before reads are ended."""
        self._files = tuple(files)
        self._shape = shape
        self._tidy = tidy
        self._mapped: list[Mapped | None] = [None] * len(files)
        self._after = [0] * len(files)
        """By segment: the number of the last record that was there when all were forgotten."""
        self._faults = 0
        self._lock = threading.Lock()
        self._numbers = count()
        self._ended: SimpleQueue[tuple[int, Sequence[RecordId], set[Origin]]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-others")
        self._origins: set[Origin] = set()
        """Of all that was read since everything was forgotten."""
        self.copied: set[RecordId] = set()
        """What the last :meth:`poll` has read."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        self._wake = wake

    def usage(self) -> StoreUsage:
        """What others have is in their usage."""
        return StoreUsage(0, 0, 0, faults=self._faults)

    def _at(self, number: int) -> Mapped | None:
        """A segment, if its engine has begun to keep such records."""
        mapped, shape = self._mapped[number], self._shape
        if mapped is None:
            if os.fstat(self._files[number]).st_size < shape.records[-1]:
                return None
            mapped = self._mapped[number] = Mapped(self._files[number], shape, writes=False)
        return mapped if mapped.is_as_expected else None

    def _find(self, each: RecordId) -> tuple[int, Mapped, int] | None:
        """Segment and slot of a record."""
        for number in range(len(self._files)):
            mapped = self._at(number)
            slot = None if mapped is None else mapped.find(each, self._after[number])
            if mapped is not None and slot is not None:
                return number, mapped, slot
        return None

    def has(self, group: int, key: bytes) -> bool:
        return self._find((group, key)) is not None

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        return False

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        number = next(self._numbers)
        self._readers.submit(self._read, number, ids, into)
        return number

    def _read(self, number: int, ids: Sequence[RecordId], into: Sequence[memoryview]) -> None:
        good, origins = 0, set[Origin]()
        for each, buffer in zip(ids, into, strict=True):
            origin = self._copy(each, buffer)
            if origin is None:
                with self._lock:
                    self._faults += 1
                break
            good += 1
            origins.add(origin)
        self._ended.put((number, ids[:good], origins))
        self._wake()

    def _copy(self, each: RecordId, buffer: memoryview) -> Origin | None:
        """Where it came from; ``None``: it is gone, was changed meanwhile, or is damaged."""
        if (found := self._find(each)) is None:
            return None
        number, mapped, slot = found
        header = mapped.header(slot)
        epoch, own, *_ = HEADER.unpack(header)
        begin, size = self._shape.record(slot)
        if os.preadv(self._files[number], [buffer], begin) != size:  # another thread may run meanwhile
            return None
        if mapped.header(slot) != header or header_of(self._shape, epoch, own, each, buffer) != header:
            return None
        return number, epoch

    def poll(self) -> Sequence[tuple[int, int]]:
        self._tidy()
        found, self.copied = [], set()
        with suppress(Empty):
            while True:
                number, read, origins = self._ended.get_nowait()
                found.append((number, len(read)))
                self.copied.update(read)
                self._origins |= origins
        return found

    def forgot(self) -> bool:
        old = {origin for origin in self._origins if not self._lasts(*origin)}
        self._origins -= old
        return bool(old)

    def _lasts(self, number: int, epoch: int) -> bool:
        mapped = self._at(number)
        return mapped is not None and mapped.epoch == epoch

    def clear(self) -> None:
        for number in range(len(self._files)):
            mapped = self._at(number)
            self._after[number] = 0 if mapped is None else mapped.words[LAST]
        self._origins.clear()

    def close(self, deadline_s: float) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
