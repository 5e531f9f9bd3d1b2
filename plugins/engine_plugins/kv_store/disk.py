"""``disk``: a file for each record, in a folder for each namespace; the least recently used make way.

A file is written beside its place and renamed: it is whole or not there. It is not synced: what a power cut tears, the
checksum shows. Nothing is trusted that is read: a file that is short, damaged or another's is a miss, and removed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.kv_store import RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine.native.folder import unusable, user_folder
from engine_plugins.kv_store.record_header import HEADER, RecordId, header_of

READERS = 4
MOST_QUEUED = 256 * 1024**2
"""Bytes that wait to be written, at most: what comes then is dropped."""
UNFINISHED = "new-"
"""Beginning of the name of a file that is being written, before its store and a number."""
UNFINISHED_S = 600.0
"""A file that has not been written to for so long will not be finished: its process was killed."""
NAMESPACE = re.compile(r"[0-9a-f]{64}")
PLACE = re.compile(
    rf"{NAMESPACE.pattern}/(([0-9a-f]{{2}})/\2[0-9a-f]{{62}}-(0|[1-9][0-9]*)|{UNFINISHED}[0-9a-f]{{16}}-[0-9]+)"
)
"""Of a store's files. Whatever else is in the folder is not theirs: it is neither counted nor removed."""
PAUSE_S = 30.0
"""Nothing is written for so long after a write has failed."""
SLACK = 0.05
"""Of the bound: so much is removed at once when it is reached, and so much may be written before files that others have
written are counted again."""


@dataclass(frozen=True)
class DiskConfig(SlotConfig):
    path: str = "auto"
    """Folder for this user alone; ``auto``: the user's cache. Engines may share it."""
    max_bytes: int = 16 * 1024**3
    """Most bytes of all files in it, those of other models included."""

    def __post_init__(self) -> None:
        at_least("kv_store.disk.max_bytes", self.max_bytes, 1 << 20)


class DiskStore:
    """See :class:`engine.contracts.kv_store.StagedStore`."""

    def __init__(self, config: DiskConfig, context: BuildContext) -> None:
        self._root = user_folder("kv") if config.path == "auto" else Path(config.path).expanduser().absolute()
        reason = unusable(self._root)
        if reason is not None:
            raise ValueError(f"kv_store.disk.path={config.path}: {reason}; choose another folder")
        self._most_bytes = config.max_bytes
        self._lock = threading.Lock()
        """Of what both the loop and threads change: the index, the counts and the generation."""
        self._index: OrderedDict[RecordId, int] = OrderedDict()  # bytes on the disk; next victim first
        self._taken = self._others = 0
        """Bytes of this namespace, and of others."""
        self._clearing = 0
        """Calls of :meth:`clear` whose files are not all gone: nothing is found that is not in the index."""
        self._written = self._queued = self._evicted = self._faults = self._generation = 0
        self._paused_until = 0.0
        self._numbers, self._token = count(), secrets.token_hex(8)
        self._reads: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        self._layout, self._wake = layout, wake
        self._folder = self._root / layout.namespace.hex()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._scan()
        self._make_room()

    # What there is -----------------------------------------------------------------------------------------------

    def count(self, ids: Sequence[RecordId]) -> int:
        for number, each in enumerate(ids):
            if each not in self._index and not self._found(each):
                return number
        return len(ids)

    def _found(self, each: RecordId) -> bool:
        """Whether another engine has written it."""
        if self._clearing:
            return False
        try:
            status = os.stat(self._file(each), follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        with self._lock:
            self._add(each, status.st_blocks * 512)
        return True

    def _add(self, each: RecordId, size: int) -> None:
        """Of a file that is there. With the lock."""
        self._taken += size - self._index.get(each, 0)
        self._index[each] = size

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(len(self._index), self._taken, self._most_bytes, self._evicted, self._faults)

    def _file(self, each: RecordId) -> Path:
        group, key = each
        name = key.hex()
        return self._folder / name[:2] / f"{name}-{group}"

    def _scan(self) -> None:
        """Count what is there, oldest first, and remove what killed processes have left."""
        own: list[tuple[float, RecordId, int]] = []
        others, generation = 0, self._generation
        for file, status in _files(self._root):
            if file.name.startswith(UNFINISHED):
                if time.time() - status.st_mtime > UNFINISHED_S:
                    with suppress(OSError):
                        file.unlink()
            elif file.parent.parent != self._folder:
                others += status.st_blocks * 512
            else:
                own.append((status.st_mtime, _id_of(file.name), status.st_blocks * 512))
        with self._lock:
            self._others, self._written = others, 0
            if generation == self._generation and not self._clearing:  # clear() has forgotten what was just counted
                self._index = OrderedDict((each, size) for _, each, size in sorted(own))
                self._taken = sum(self._index.values())

    # Writing -----------------------------------------------------------------------------------------------------

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        with self._lock:
            if (group, key) in self._index:
                self._index.move_to_end((group, key))
                return False
            if self._queued + len(record) > MOST_QUEUED or time.monotonic() < self._paused_until:
                return False
            self._queued += len(record)
            generation = self._generation
        self._writer.submit(self._write, (group, key), record, done, generation)
        return True

    def _write(self, each: RecordId, record: memoryview, done: Callable[[], None], generation: int) -> None:
        new = self._folder / f"{UNFINISHED}{self._token}-{next(self._numbers)}"
        target = self._file(each)
        try:
            if generation == self._generation:
                self._make_folder()
                _write_file(new, header_of(each, record), record)
                size = new.stat().st_blocks * 512
                target.parent.mkdir(mode=0o700, exist_ok=True)
                with self._lock:  # not after clear()
                    if generation == self._generation:
                        os.replace(new, target)
                        self._add(each, size)
                        self._written += size
                self._make_room()
        except OSError as error:
            with self._lock:
                self._faults += 1
                self._paused_until = time.monotonic() + PAUSE_S
            warnings.warn(
                f"kv_store.disk.path={self._root}: nothing is written for {PAUSE_S:g} s: {error}", stacklevel=1
            )
        finally:
            with suppress(OSError):
                new.unlink()
            with self._lock:
                self._queued -= len(record)
            done()

    def _make_folder(self) -> None:
        """Again, if somebody has removed it with all that was in it."""
        if self._folder.is_dir():
            return
        with self._lock:
            self._index.clear()
            self._taken = 0
        reason = unusable(self._root)
        if reason is not None:
            raise OSError(reason)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def _make_room(self) -> None:
        """Remove files while there are too many bytes: other namespaces first, of which the oldest."""
        if self._written > SLACK * self._most_bytes:
            self._scan()
        with self._lock:
            too_many = self._taken + self._others - self._most_bytes
        if too_many <= 0:
            return
        too_many += int(SLACK * self._most_bytes)
        if self._others:
            files = [(status.st_mtime, status.st_blocks * 512, file) for file, status in _files(self._root)
                     if file.parent.parent != self._folder]  # fmt: skip
            for _, size, file in sorted(files):
                if too_many <= 0:
                    return
                with suppress(OSError):
                    file.unlink()
                too_many -= size
                self._others -= size
        while too_many > 0:
            with self._lock:
                if not self._index:
                    return
                each, size = self._index.popitem(last=False)
                self._taken -= size
                self._evicted += 1
            with suppress(OSError):
                self._file(each).unlink()
            too_many -= size

    # Reading -----------------------------------------------------------------------------------------------------

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        number, share = next(self._numbers), -(-len(ids) // READERS)
        parts = [slice(at, at + share) for at in range(0, len(ids), share)]
        read = [self._readers.submit(self._read, ids[part], into[part]) for part in parts]
        left = [len(parts)]

        def ended(_: Future[int]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
            good = 0
            for part, future in zip(parts, read, strict=True):
                found = 0 if future.cancelled() else future.result()
                good += found
                if found < len(ids[part]):
                    break
            self._reads.put((number, good))
            self._wake()

        for future in read:
            future.add_done_callback(ended)
        return number

    def poll(self) -> Sequence[tuple[int, int]]:
        found = []
        with suppress(Empty):
            while True:
                found.append(self._reads.get_nowait())
        return found

    def _read(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        for number, (each, buffer) in enumerate(zip(ids, into, strict=True)):
            file = self._file(each)
            try:
                good = _read_file(file, each, buffer)
                if not good:
                    file.unlink()
            except OSError:
                good = False
            if not good:
                with self._lock:
                    self._taken -= self._index.pop(each, 0)
                    self._faults += 1
                return number
            with self._lock:
                if each in self._index:
                    self._index.move_to_end(each)
        return len(ids)

    # The end -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
            self._clearing += 1
            self._index.clear()
            self._taken = 0
        self._writer.submit(self._remove_all)

    def _remove_all(self) -> None:
        gone = True
        for file, _ in _files(self._root):
            if file.parent.parent == self._folder:
                try:
                    file.unlink(missing_ok=True)
                except OSError:
                    gone = False
        with self._lock:
            self._clearing -= gone

    def close(self, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        self._readers.shutdown(wait=False, cancel_futures=True)
        while self._queued and time.monotonic() < ends:
            threading.Event().wait(0.01)
        with self._lock:
            self._generation += 1  # what is not written by now is not wanted
        self._writer.shutdown(wait=True)


def _write_file(file: Path, header: bytes, record: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as stream:
        stream.write(header)
        left = record
        while left:
            left = left[stream.write(left) :]


def _read_file(file: Path, each: RecordId, buffer: memoryview) -> bool:
    """Whether all of it is there, as it was written for this id. It then counts as just used."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        header = bytearray(HEADER.size)
        if os.preadv(descriptor, [header, buffer], 0) != HEADER.size + len(buffer):
            return False
        if bytes(header) != header_of(each, buffer):
            return False
        with suppress(OSError):  # where nothing can be written
            os.utime(descriptor)
    finally:
        os.close(descriptor)
    return True


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files of stores below."""
    for above, folders, names in os.walk(root):
        if above == str(root):
            folders[:] = filter(NAMESPACE.fullmatch, folders)
        for file in [Path(above, name) for name in names]:
            if PLACE.fullmatch(file.relative_to(root).as_posix()):
                with suppress(OSError):
                    status = os.stat(file, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield file, status


def _id_of(name: str) -> RecordId:
    key, _, group = name.partition("-")
    return int(group), bytes.fromhex(key)
