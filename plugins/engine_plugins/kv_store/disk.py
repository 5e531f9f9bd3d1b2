"""``disk``: a file for each record, in a folder for each namespace; the least recently used make way.

Nothing is trusted that is read: a file that is short, damaged or another's is a miss, and removed.

What is to stay (:class:`engine.contracts.kv_store.RetainingStagedStore`) makes way last of its owner's records. An
attribute of each file says whose it is, and how long it stays, to later engines and to others that share the folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue

from engine.contracts.config import SlotConfig, at_least, one_of
from engine.contracts.kv_store import RecordId, RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine.native.folder import unusable, user_folder
from engine_plugins.eviction import MOST_RETAINED
from engine_plugins.kv_store.record_files import (
    ABOUT,
    CLEARING,
    NAMESPACE,
    UNFINISHED,
    About,
    file_of,
    id_of,
    keep_file,
    read_file,
    record_files,
    stay_of,
    write_about,
    write_file,
)
from engine_plugins.kv_store.record_header import header_of

READERS = 4
MOST_QUEUED = 256 * 1024**2
"""Bytes that wait to be written, at most: what comes then is dropped."""
UNFINISHED_S = 600.0
"""A file that has not been written to for so long will not be finished: its process was killed."""
LOOK_S = 0.05
"""How long the loop waits until a file system says whether a file is there: what takes longer is a miss."""
MOST_LOOKS_S = 0.25
"""That it waits in all from one :meth:`DiskStore.poll` to the next."""
PAUSE_S = 30.0
"""Nothing is written for so long after a write has failed."""
SLACK = 0.05
"""Of the bound: so much is removed at once when it is reached, and so much may be written before files that others have
written are counted again."""

RENEWED = 0.1
"""Of the time that a record stays: a use within so much of it after the last one is not written to its file."""
BURST_S = 10.0
"""A budget of bytes a second that was not used for so long may be used at once."""
SEEN_BITS = 1 << 24
MOST_SEEN = 1 << 20
"""Records that were offered once: so many are remembered at least, and twice as many at most. A disk of as many tokens
needs that: what is remembered no longer than it stays in memory is seldom seen again."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DiskConfig(SlotConfig):
    path: str = "auto"
    """Folder for this user alone; ``auto``: the user's cache. Engines may share it."""
    max_bytes: int = 16 * 1024**3
    """Most bytes of all files in it, those of other models included."""
    writes: str = "all"
    """``all``: every record; ``used``: those that a second request begins with."""
    write_bytes_s: int = 0
    """Most bytes a second that are written, over ten seconds; 0: as many as there are."""

    def __post_init__(self) -> None:
        at_least("kv_store.disk.max_bytes", self.max_bytes, 1 << 20)
        one_of("kv_store.disk.writes", self.writes, ("all", "used"))
        at_least("kv_store.disk.write_bytes_s", self.write_bytes_s, 0)


class Seen:
    """Which records were offered before: two Bloom filters, of which the older one is forgotten when the newer one is
    full. One of 400 that were not counts as seen, and is written early."""

    def __init__(self) -> None:
        self._new, self._old, self._count = bytearray(SEEN_BITS // 8), bytearray(SEEN_BITS // 8), 0

    def again(self, group: int, key: bytes) -> bool:
        """Whether it was; from now on it is."""
        # A key is a digest: its parts are as good as hashes of it.
        bits_of_key = [(int.from_bytes(key[at : at + 4], "big") + group) % SEEN_BITS for at in (0, 4, 8, 12)]
        found = any(all(bits[at >> 3] >> (at & 7) & 1 for at in bits_of_key) for bits in (self._new, self._old))
        if self._count == MOST_SEEN:
            self._new, self._old, self._count = bytearray(SEEN_BITS // 8), self._new, 0
        for at in bits_of_key:
            self._new[at >> 3] |= 1 << (at & 7)
        self._count += 1
        return found


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a file."""

    size: int
    """Bytes on the disk."""
    owner: bytes = b""
    """Whose it is, as far as that is known."""
    seconds: float = 0.0
    """It is to stay so long after its last use."""
    used_s: float = 0.0
    """Of those that are to stay: when that was, by the system's clock."""

    @property
    def until_s(self) -> float:
        return self.used_s + self.seconds


class DiskStore:
    """See :class:`engine.contracts.kv_store.RetainingStagedStore`."""

    def __init__(self, config: DiskConfig, context: BuildContext) -> None:
        self._root = user_folder("kv") if config.path == "auto" else Path(config.path).expanduser().absolute()
        reason = unusable(self._root)
        if reason is not None:
            raise ValueError(f"kv_store.disk.path={config.path}: {reason}; choose another folder")
        self._most_bytes, self._bytes_s = config.max_bytes, config.write_bytes_s
        self._budget, self._budget_at_s = config.write_bytes_s * BURST_S, time.monotonic()
        """Bytes that may be written now, as of then."""
        self._seen = Seen() if config.writes == "used" else None
        self._context = context
        self._lock = threading.Lock()
        """Of what both the loop and threads change: the index, the counts and the generation."""
        self._index: OrderedDict[RecordId, Kept] = OrderedDict()  # next victim first
        self._coming: dict[RecordId, Kept] = {}
        """What waits to be written."""
        self._damaged: set[RecordId] = set()
        """Whose files are not as they were written, and cannot be removed: they are not read again."""
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
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="kv-look")
        self._look: Future[tuple[os.stat_result, tuple[bytes, float]]] | None = None
        self._looked_s = 0.0
        """Spent on looking since the last poll."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        self._layout, self._wake = layout, wake
        self._folder = self._root / layout.namespace.hex()
        if self._folder.is_symlink():  # what lies behind it would be neither counted nor removed
            raise ValueError(f"kv_store.disk.path={self._root}: {self._folder} is a link, expected a folder; remove it")
        self._scan()
        if os.path.lexists(self._folder / CLEARING):  # its engine was killed before all were gone
            self.clear()
        self._tidy()
        try:
            self._make_folder()
        except OSError as error:  # as on a full disk: an engine starts there, too
            self._pause(error)
        self._make_room()

    # What there is -----------------------------------------------------------------------------------------------

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self._index or self._found((group, key))

    def _found(self, each: RecordId) -> bool:
        """Whether another engine has written it. While the file system hangs, nobody waits for it."""
        if (
            self._clearing
            or each in self._damaged
            or self._looked_s >= MOST_LOOKS_S
            or (self._look is not None and not self._look.done())
        ):
            return False
        begun_s = time.monotonic()
        self._look = self._looker.submit(status_of, file_of(self._folder, each))
        try:
            status, stay = self._look.result(LOOK_S)
        except OSError:  # not there, or not known in time
            return False
        finally:
            self._looked_s += time.monotonic() - begun_s
        if not stat.S_ISREG(status.st_mode):
            return False
        with self._lock:
            self._add(each, Kept(status.st_blocks * 512, *stay, status.st_mtime))
        return True

    def _add(self, each: RecordId, kept: Kept) -> None:
        """Of a file that is there. With the lock."""
        self._forget(each)
        self._index[each] = kept
        self._taken += kept.size

    def _forget(self, each: RecordId) -> None:
        """With the lock."""
        if (kept := self._index.pop(each, None)) is not None:
            self._taken -= kept.size

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(len(self._index), self._taken, self._most_bytes, self._evicted, self._faults)

    def _scan(self) -> None:
        """Count what is there, oldest first, and remove what killed processes have left."""
        own: list[tuple[float, RecordId, Kept]] = []
        others, generation, now = 0, self._generation, time.time()
        for file, status in record_files(self._root):
            if file.name.startswith(UNFINISHED):
                if abs(now - status.st_mtime) > UNFINISHED_S:  # clocks are also put back
                    with suppress(OSError):
                        file.unlink()
            elif file.parent.parent != self._folder:
                others += status.st_blocks * 512
            else:
                used_s = status.st_mtime
                if used_s > now + UNFINISHED_S:
                    used_s = now
                    with suppress(OSError):
                        os.utime(file)
                own.append((used_s, id_of(file.name), Kept(status.st_blocks * 512, *stay_of(file), used_s)))
        own.sort(key=lambda each: each[:2])
        with self._lock:
            self._others, self._written = others, 0
            if generation == self._generation and not self._clearing:  # clear() has forgotten what was just counted
                self._index = OrderedDict(
                    (each, _known(kept, self._index.get(each))) for _, each, kept in own if each not in self._damaged
                )
                self._taken = sum([kept.size for kept in self._index.values()])

    def _tidy(self) -> None:
        """Remove what is left of namespaces that have no records any more."""
        for name in filter(NAMESPACE.fullmatch, os.listdir(self._root)):
            folder = self._root / name
            with suppress(OSError):  # somebody else uses it
                is_old = time.time() - folder.stat().st_mtime > UNFINISHED_S
                if folder != self._folder and is_old and not folder.is_symlink():
                    remove_empty(folder)

    # Writing -----------------------------------------------------------------------------------------------------

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        with self._lock:
            if (group, key) in self._index:
                self._index.move_to_end((group, key))
                return False
            if self._seen is not None and not self._seen.again(group, key):
                return False
            if self._queued + len(record) > MOST_QUEUED or time.monotonic() < self._paused_until:
                return False
            if self._bytes_s and not self._is_affordable(len(record)):
                return False
            self._queued += len(record)
            self._coming[group, key] = Kept(0)
            generation = self._generation
        self._writer.submit(self._write, (group, key), record, done, generation)
        return True

    def _is_affordable(self, num_bytes: int) -> bool:
        """Whether a record may be written by the budget, which is then less. The last one may exceed it, so that any
        record is written at some time."""
        now = time.monotonic()
        most = self._bytes_s * BURST_S
        self._budget = min(most, self._budget + (now - self._budget_at_s) * self._bytes_s)
        self._budget_at_s = now
        if self._budget <= 0.0:
            return False
        self._budget -= num_bytes
        return True

    def _write(self, each: RecordId, record: memoryview, done: Callable[[], None], generation: int) -> None:
        try:
            if generation == self._generation:
                self._make_folder()
                try:
                    self._keep(each, record, generation)
                except OSError as error:
                    if error.errno in FULL:
                        self._evict(max(2 * len(record), int(SLACK * self._taken)))
                    elif error.errno != errno.ENOENT:
                        raise
                    self._make_folder()  # which somebody may have cleared just now
                    self._keep(each, record, generation)
                self._make_room()
        except OSError as error:
            self._pause(error)
        finally:
            with self._lock:
                self._queued -= len(record)
                if generation == self._generation:  # or it is a later one of this name
                    self._coming.pop(each, None)
            done()

    def _pause(self, error: OSError) -> None:
        with self._lock:
            self._faults += 1
            self._paused_until = time.monotonic() + PAUSE_S
        self._warn(f"nothing is written for {PAUSE_S:g} s: {error}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"kv_store.disk.path={self._root}: {what}", stacklevel=3)

    def _keep(self, each: RecordId, record: memoryview, generation: int) -> None:
        new, target, kept = self._new(), file_of(self._folder, each), Kept(0)
        try:
            write_file(new, header_of(each, record), record)
            size = new.stat().st_blocks * 512
            target.parent.mkdir(mode=0o700, exist_ok=True)
            if generation == self._generation:
                os.replace(new, target)  # without the lock, which the loop takes
            with self._lock:
                if generation == self._generation:  # or clear() removes the file next
                    kept = replace(self._coming.pop(each, kept), size=size)
                    self._damaged.discard(each)
                    self._add(each, kept)
                    self._written += size
            if kept.owner:
                keep_file(target, kept.owner, kept.seconds)
        finally:
            with suppress(OSError):
                new.unlink()

    def retain(self, tenant: bytes, group: int, keys: Sequence[bytes], seconds: float) -> None:
        now_s, renewed = time.time(), list[tuple[RecordId, Kept]]()
        with self._lock:
            for key in reversed(keys):
                each = group, key
                known_files = self._index if each in self._index else self._coming
                if (known := known_files.get(each)) is None:
                    continue
                kept = replace(known, owner=tenant)
                if seconds:
                    longest_s = max(seconds, known.seconds) if known.until_s > now_s else seconds
                    if longest_s != known.seconds or now_s - known.used_s > RENEWED * longest_s:
                        kept = replace(kept, seconds=longest_s, used_s=now_s)
                known_files[each] = kept
                if each in self._index:
                    if seconds:
                        self._index.move_to_end(each)
                    if kept != known:
                        renewed.append((each, kept))
        if renewed:
            self._writer.submit(self._keep_files, renewed)

    def _keep_files(self, renewed: Sequence[tuple[RecordId, Kept]]) -> None:
        for each, kept in renewed:
            keep_file(file_of(self._folder, each), kept.owner, kept.seconds)

    def _new(self) -> Path:
        """Where a file is written first."""
        return self._folder / f"{UNFINISHED}{self._token}-{next(self._numbers)}"

    def _make_folder(self) -> None:
        """Also again, if somebody has removed it with all that was in it."""
        if self._folder.is_dir():
            return
        with self._lock:
            self._index.clear()
            self._taken = 0
        reason = unusable(self._root)
        if reason is not None:
            raise OSError(reason)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        context = self._context
        about = About(
            context.model.name, context.dtype, context.device.kind, context.block_size, self._layout.num_bytes
        )
        with suppress(OSError):  # as on a full disk: people see its digest, then
            write_about(self._folder, about, self._new())

    def _make_room(self) -> None:
        """Remove files while there are too many bytes."""
        if self._written > SLACK * self._most_bytes:
            self._scan()
        with self._lock:
            too_many = self._taken + self._others - self._most_bytes
        if too_many > 0:
            self._evict(too_many + int(SLACK * self._most_bytes))

    def _evict(self, too_many: int) -> None:
        """Remove files of so many bytes: of other namespaces first, the least recently used."""
        if self._others:
            files = [
                (status.st_mtime, status.st_blocks * 512, file)
                for file, status in record_files(self._root)
                if file.parent.parent != self._folder and not file.name.startswith(UNFINISHED)
            ]
            for _, size, file in sorted(files):
                if too_many <= 0:
                    return
                with suppress(OSError):
                    file.unlink()
                too_many -= size
                self._others -= size
        with self._lock:
            order = [*self._index.items()]
        for each in in_turn(order, MOST_RETAINED * self._most_bytes, time.time()):
            if too_many <= 0:
                return
            with self._lock:
                if each not in self._index:
                    continue
                too_many -= self._index[each].size
                self._forget(each)
                self._evicted += 1
            with suppress(OSError):
                file_of(self._folder, each).unlink()

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
        self._looked_s = 0.0
        found = []
        with suppress(Empty):
            while True:
                found.append(self._reads.get_nowait())
        return found

    def _read(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        for number, (each, buffer) in enumerate(zip(ids, into, strict=True)):
            file = file_of(self._folder, each)
            try:
                good = read_file(file, each, buffer)
            except OSError:  # gone, or not to be opened now
                good = False
            else:
                if not good:
                    self._remove_damaged(each, file)
            if not good:
                with self._lock:
                    self._forget(each)
                    self._faults += 1
                return number
            with self._lock:
                if each in self._index:
                    self._index[each] = replace(self._index[each], used_s=time.time())
                    self._index.move_to_end(each)
        return len(ids)

    def _remove_damaged(self, each: RecordId, file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            with self._lock:
                self._damaged.add(each)
            self._warn(f"damaged records cannot be removed: {error.strerror}; they are not read again")

    # The end -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
            self._clearing += 1
            self._index.clear()
            self._coming.clear()
            self._taken = 0
        self._writer.submit(self._remove_all)

    def _remove_all(self) -> None:
        left, why, mark = 0, "", self._folder / CLEARING
        with suppress(OSError):  # as where nothing was written yet
            mark.touch(0o600)
        for file, _ in record_files(self._root, self._folder.name):
            if not file.name.startswith(UNFINISHED):  # which another engine may be writing
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    left, why = left + 1, str(error.strerror)
        if left:
            then = "removes them" if os.path.lexists(mark) else "finds them again, unless you remove them"
            self._warn(f"{left} records cannot be removed: {why}; they are not found, and the next engine {then}")
            return
        with suppress(OSError):
            mark.unlink()
        with self._lock:
            self._clearing -= 1

    def close(self, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        self._readers.shutdown(wait=False, cancel_futures=True)
        while self._queued and time.monotonic() < ends:
            threading.Event().wait(0.01)
        with self._lock:
            self._generation += 1  # what is not written by now is not wanted
            late = len(self._coming)
        if late:
            self._warn(f"{late} records were not written within {deadline_s:g} s of closing")
        last = self._writer.submit(int)
        for threads in (self._writer, self._looker):
            threads.shutdown(wait=False)
        with suppress(TimeoutError):  # where the file system hangs
            last.result(max(1.0, ends - time.monotonic()))


def status_of(file: Path) -> tuple[os.stat_result, tuple[bytes, float]]:
    """And how long it is to stay (:func:`stay_of`). Raises ``OSError``."""
    return os.stat(file, follow_symlinks=False), stay_of(file)


def _known(kept: Kept, known: Kept | None) -> Kept:
    """What a file says, and what this store knows that its file does not, or not yet."""
    if known is None:
        return kept
    kept = replace(kept, owner=kept.owner or known.owner)
    return replace(kept, seconds=known.seconds, used_s=known.used_s) if known.until_s > kept.until_s else kept


def in_turn(files: Sequence[tuple[RecordId, Kept]], most_retained: float, now_s: float) -> Iterator[RecordId]:
    """In which order files make way. ``files``: the least recently used first. Each says whose turn it is; of an
    owner's, those that are to stay are last, the next to lapse first. ``most_retained``: bytes of one owner's; what
    exceeds it is as any."""
    staying: defaultdict[bytes, list[tuple[RecordId, Kept]]] = defaultdict(list)
    for each, kept in files:
        if kept.seconds and kept.until_s > now_s:
            staying[kept.owner].append((each, kept))
    stays = set[RecordId]()
    for own in staying.values():
        own.sort(key=lambda file: file[1].until_s)
        room = most_retained
        for each, kept in reversed(own):
            room -= kept.size
            if room < 0:
                break
            stays.add(each)
    turns: defaultdict[tuple[bytes, int], deque[RecordId]] = defaultdict(deque)
    others = [(each, kept) for each, kept in files if kept.owner in staying and each not in stays]
    for each, kept in (*others, *[file for own in staying.values() for file in own if file[0] in stays]):
        turns[kept.owner, each[0]].append(each)
    for each, kept in files:
        yield turns[kept.owner, each[0]].popleft() if kept.owner in staying else each


def remove_empty(folder: Path) -> None:
    """Remove the folder of a namespace, if neither a record nor anything else is in it. Raises ``OSError``."""
    for below in folder.iterdir():
        with suppress(OSError):
            below.rmdir()
    if {*folder.iterdir()} <= {folder / ABOUT, folder / CLEARING}:
        for name in (ABOUT, CLEARING):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
