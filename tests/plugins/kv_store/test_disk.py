"""Records in files: what is damaged, foreign or gone is a miss, and the folder keeps its bound."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contracts.kv_store import RecordId, RecordLayout, StagedStore
from engine.testing.context import build_context
from engine.testing.kv_store import LAYOUT, LONGEST_S, OTHER, KVStoreConformance, ids_of, record_of
from engine_plugins.kv_store import disk
from engine_plugins.kv_store.disk import DiskConfig, DiskStore, Kept, in_turn
from engine_plugins.kv_store.record_files import ABOUT, STAY, file_of, read_about
from engine_plugins.kv_store.record_header import HEADER


class Suite(KVStoreConformance):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> DiskStore:
        return DiskStore(DiskConfig(path=str(self.folder), max_bytes=1 << 20), build_context())


class TestConformance(KVStoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self) -> DiskStore:
        return DiskStore(DiskConfig(path=str(self.folder), max_bytes=1 << 20), build_context())


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def num_found(store: StagedStore, ids: list[RecordId]) -> int:
    return sum(store.has(*each) for each in ids)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != ABOUT)


def test_records_outlive_their_store(suite: Suite) -> None:
    ids, store = ids_of(6), suite.staged()
    suite.written(store, ids)
    store.close(1.0)
    again = suite.staged()
    assert num_found(again, ids) == 6 and suite.read(again, ids) == [record_of(each) for each in ids]
    again.close(1.0)


def test_two_stores_on_one_folder_find_what_the_other_has_written(suite: Suite) -> None:
    ids, one, two = ids_of(6), suite.staged(), suite.staged()
    suite.written(one, ids)
    assert num_found(two, ids) == 6 and suite.read(two, ids) == [record_of(each) for each in ids]
    one.close(1.0)
    two.close(1.0)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HEADER.size + 36] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, 1500)


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def swapped(file: Path) -> None:
    """The record of another block, whole and with its own checksum."""
    other = next(each for each in files(file.parents[1]) if each != file and each.stat().st_size == file.stat().st_size)
    file.write_bytes(other.read_bytes())


def linked(file: Path) -> None:
    kept = file.with_name("kept")
    file.rename(kept)
    file.symlink_to(kept)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def of_another_format(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4] += 1
    file.write_bytes(data)


@pytest.mark.parametrize("spoil", [flipped, cut, emptied, swapped, linked, piped, of_another_format, Path.unlink])
def test_a_file_that_is_not_as_it_was_written_is_a_miss(suite: Suite, spoil: Callable[[Path], None]) -> None:
    ids, store = ids_of(6), suite.staged()
    suite.written(store, ids)
    spoil(file_of(suite.folder / LAYOUT.namespace.hex(), ids[2]))
    assert suite.read(store, ids) == [record_of(each) for each in ids[:2]]
    assert store.usage().faults == 1 and not store.has(*ids[2]), "it is not tried again"
    suite.written(store, ids[2:3])
    assert suite.read(store, ids) == [record_of(each) for each in ids]
    store.close(1.0)


def test_a_damaged_file_that_cannot_be_removed_is_counted_once(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store = ids_of(6), suite.staged()
    suite.written(store, ids)
    flipped(file_of(suite.folder / LAYOUT.namespace.hex(), ids[2]))

    def read_only(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="cannot be removed: Read-only file system"):
        patch.setattr(Path, "unlink", read_only)
        assert suite.read(store, ids) == [record_of(each) for each in ids[:2]]
    store._scan()
    assert not store.has(*ids[2]) and num_found(store, ids) == 5 and store.usage().faults == 1
    suite.written(store, ids[2:3])
    assert suite.read(store, ids) == [record_of(each) for each in ids]
    store.close(1.0)


def test_the_folder_keeps_its_bound(suite: Suite) -> None:
    store = suite.staged()
    for number in range(12):
        suite.written(store, ids_of(40, f"text {number}"))
        assert sum(file.stat().st_blocks * 512 for file in files(suite.folder)) <= (1 << 20) + 80 * 8192
    usage = store.usage()
    assert usage.evicted and usage.num_bytes <= usage.most_bytes
    assert num_found(store, ids_of(40, "text 11")) == 40 and num_found(store, ids_of(1, "text 0")) == 0
    store.close(1.0)
    again = suite.staged()
    assert again.usage().num_bytes <= again.usage().most_bytes
    again.close(1.0)


def test_records_of_another_model_make_way_first(suite: Suite) -> None:
    old = suite.staged(OTHER)
    for number in range(3):
        suite.written(old, ids_of(30, f"old {number}"))
    old.close(1.0)
    new = suite.staged()
    unfinished = new._folder / f"new-{'a' * 16}-7"
    unfinished.write_bytes(b"what another engine is writing")
    os.utime(unfinished, (time.time() - 300.0,) * 2)
    for number in range(3):
        suite.written(new, ids_of(30, f"new {number}"))
    unfinished.unlink()
    assert all(num_found(new, ids_of(30, f"new {number}")) == 30 for number in range(3))
    left = sum(file.stat().st_blocks * 512 for file in files(suite.folder))
    assert left <= 1 << 20
    new.close(1.0)


def test_what_a_tenant_retains_goes_after_its_others_also_in_later_engines_and_costs_nobody_else_anything(
    suite: Suite,
) -> None:
    def written(store: DiskStore, tenant: bytes, text: str) -> None:
        suite.written(store, ids_of(40, text))
        for group in range(2):
            store.retain(tenant, group, [key for at, key in ids_of(40, text) if at == group], 0.0)

    try:
        os.setxattr(suite.folder, STAY, b"")
    except OSError as error:
        pytest.skip(f"later engines are not told: {error}")
    mine, theirs = b"m" * 32, b"t" * 32
    first = suite.staged()
    assert isinstance(first, DiskStore)
    for tenant, text in ((mine, "kept"), (theirs, "their first"), (mine, "mine"), (theirs, "their last")):
        written(first, tenant, text)
    for group in range(2):
        first.retain(mine, group, [key for at, key in ids_of(40, "kept") if at == group], 3600.0)
    first.close(LONGEST_S)
    one, two = suite.staged(), suite.staged()
    assert isinstance(one, DiskStore) and isinstance(two, DiskStore)
    kept = {(group, key): kept for (group, key), kept in two._index.items() if kept.seconds}
    assert kept.keys() == {*ids_of(40, "kept")} and {each.owner for each in kept.values()} == {mine}
    for number, store in enumerate((one, two, one, two)):
        written(store, mine, f"more {number}")
    assert num_found(two, ids_of(40, "kept")) == 40
    assert num_found(two, ids_of(40, "their first")) == 0, "it was used before all others"
    one.close(1.0)
    two.close(1.0)


def test_what_is_to_stay_is_known_for_as_long_as_the_store_where_files_cannot_say_it(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "stay_of", lambda file: (b"", 0.0))
    store = suite.staged()
    assert isinstance(store, DiskStore)
    suite.written(store, ids_of(4, "kept"))
    store.retain(b"m" * 32, 0, [key for group, key in ids_of(4, "kept") if group == 0], 3600.0)
    store._scan()
    stays = {each for each, kept in store._index.items() if kept.seconds == 3600.0 and kept.owner == b"m" * 32}
    assert stays == {each for each in ids_of(4, "kept") if each[0] == 0} != set()
    store.close(1.0)


def test_of_an_owner_what_is_to_stay_makes_way_last_the_next_to_lapse_first_and_only_so_much_stays() -> None:
    def turns(most: float, now_s: float) -> str:
        kept = {
            "a": Kept(1, b"m", 90.0, 10.0), "b": Kept(1, b"t"), "c": Kept(1, b"m", 50.0, 10.0), "d": Kept(1, b"m"),
            "e": Kept(1), "f": Kept(1, b"m"),
        }  # fmt: skip
        return "".join(
            name.decode() for _, name in in_turn([((0, n.encode()), k) for n, k in kept.items()], most, now_s)
        )

    assert turns(2, 20.0) == "dbfcea"
    assert turns(1, 20.0) == "cbdfea", "the first to lapse is as any"
    assert turns(2, 70.0) == "cbdfea", "it has lapsed"
    assert turns(2, 200.0) == turns(0, 20.0) == "abcdef"


def test_a_write_that_fails_stops_writes_and_nothing_else(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store = ids_of(8), suite.staged()
    suite.written(store, ids[:4])

    def failing(file: Path, header: bytes, record: memoryview) -> None:
        file.write_bytes(header)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "write_file", failing)
    suite.written(store, ids[4:5])
    assert not store.put(*ids[5], memoryview(record_of(ids[5])), lambda: None), "it goes on writing"
    assert num_found(store, ids) == 4 and suite.read(store, ids[:4]) == [record_of(each) for each in ids[:4]]
    assert store.usage().faults == 1 and len(files(suite.folder)) == 4, "the half file is gone"
    store.close(1.0)


def test_on_a_full_disk_the_oldest_of_its_own_make_way(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else has filled it, long before the bound is reached."""
    ids, store, write, most = ids_of(60), suite.staged(), disk.write_file, 40

    def almost_full(file: Path, header: bytes, record: memoryview) -> None:
        if len(files(suite.folder)) > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, header, record)

    monkeypatch.setattr(disk, "write_file", almost_full)
    suite.written(store, ids)
    assert store.usage().faults == 0 and store.usage().evicted >= 20
    assert num_found(store, ids[-20:]) == 20 and num_found(store, ids[:10]) == 0
    store.close(1.0)


def test_an_engine_starts_on_a_full_disk(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """And writes when there is room again."""
    ids = ids_of(4)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="nothing is written for 30 s.*No space left"):
        patch.setattr(Path, "mkdir", full)
        store = suite.staged()
    assert store.usage().faults == 1 and num_found(store, ids) == 0
    assert not store.put(*ids[0], memoryview(record_of(ids[0])), lambda: None)
    monkeypatch.setattr(store, "_paused_until", 0.0)
    suite.written(store, ids)
    assert suite.read(store, ids) == [record_of(each) for each in ids]
    store.close(1.0)


def test_a_link_in_the_place_of_a_namespace_is_refused(suite: Suite) -> None:
    """Its files would be found after they were forgotten, and be beyond the bound."""
    elsewhere = suite.folder / "elsewhere"
    (elsewhere / "empty").mkdir(parents=True)
    os.utime(elsewhere, (1e9, 1e9))
    link = suite.folder / OTHER.namespace.hex()
    link.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link, expected a folder; remove it"):
        suite.staged(OTHER)
    suite.staged().close(1.0)
    assert link.is_symlink() and (elsewhere / "empty").exists(), "what is behind it is not a store's"


def test_records_are_written_at_their_second_use_where_that_is_asked(suite: Suite) -> None:
    config = DiskConfig(path=str(suite.folder), max_bytes=1 << 20, writes="used")
    store, ids, done = DiskStore(config, build_context()), ids_of(6), threading.Semaphore(0)
    store.open(LAYOUT, lambda: None)
    offered = [[store.put(*each, memoryview(record_of(each)), done.release) for each in ids] for _ in range(2)]
    assert offered == [[False] * 6, [True] * 6]
    store.close(LONGEST_S)
    assert num_found(store, ids) == 6
    with pytest.raises(ValueError, match=r"kv_store\.disk\.writes=some: expected one of all, used"):
        DiskConfig(writes="some")


def test_what_was_offered_is_remembered_for_so_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_SEEN", 100)
    seen, ids = disk.Seen(), ids_of(400)
    assert sum(seen.again(*each) for each in ids) <= 1, "not offered before"
    assert all(seen.again(*each) for each in ids[-100:])
    assert not any(seen.again(*each) for each in ids[:100])


def test_a_budget_bounds_what_is_written(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    config = DiskConfig(path=str(suite.folder), max_bytes=1 << 20, write_bytes_s=1000)
    store, ids = DiskStore(config, build_context()), ids_of(80)[::2]  # of 4,096 bytes
    store.open(LAYOUT, lambda: None)

    def wanted(some: list[RecordId]) -> int:
        return sum(store.put(*each, memoryview(record_of(each)), lambda: None) for each in some)

    assert wanted(ids[:10]) == 3, "of ten seconds, the last one beyond them"
    now[0] += 2.0
    assert wanted(ids[10:20]) == 0, "what was beyond is paid first"
    now[0] += 3600.0
    assert wanted(ids[20:]) == 3, "not of the hour in which nothing was written"
    store.close(LONGEST_S)


def test_a_clock_that_was_put_back_leaves_neither_files_nor_an_order(suite: Suite) -> None:
    ids, store, ahead = ids_of(4), suite.staged(), time.time() + 86400.0
    suite.written(store, ids)
    store.close(1.0)
    folder = suite.folder / LAYOUT.namespace.hex()
    unfinished = folder / f"new-{'a' * 16}-7"
    unfinished.write_bytes(b"x")
    for file in (file_of(folder, ids[0]), unfinished):
        os.utime(file, (ahead, ahead))
    again = suite.staged()
    assert not unfinished.exists() and num_found(again, ids) == 4
    for number in range(6):
        suite.written(again, ids_of(40, f"text {number}"))
    assert num_found(again, ids) == 0
    again.close(1.0)


def test_a_namespace_says_what_it_is_of_and_goes_with_its_records(suite: Suite) -> None:
    old = suite.staged(OTHER)
    suite.written(old, ids_of(4))
    old.close(1.0)
    folder = suite.folder / OTHER.namespace.hex()
    assert read_about(folder).record_bytes == OTHER.num_bytes and read_about(folder).model
    for file in folder.rglob("*-[01]"):
        file.unlink()
    suite.staged().close(1.0)
    assert folder.exists(), "somebody may just have made it"
    os.utime(folder, (1e9, 1e9))
    suite.staged().close(1.0)
    assert not folder.exists()


def test_a_folder_that_is_gone_is_a_fault_and_no_crash(suite: Suite) -> None:
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)
    shutil.rmtree(suite.folder / LAYOUT.namespace.hex())
    assert suite.read(store, ids) == []
    suite.written(store, ids[:1])
    assert store.usage().faults
    store.close(1.0)


def test_what_a_killed_process_left_is_removed(suite: Suite) -> None:
    store = suite.staged()
    store.close(1.0)
    folder = suite.folder / LAYOUT.namespace.hex()
    old, new = (folder / f"new-{token * 16}-7" for token in "ab")
    for file in (old, new):
        file.write_bytes(b"x" * 100)
    os.utime(old, (time.time() - 2 * disk.UNFINISHED_S,) * 2)
    suite.staged().close(1.0)
    assert files(folder) == [new], "what somebody may be writing stays"


def test_two_stores_of_one_process_number_write_beside_each_other(suite: Suite) -> None:
    """As the first processes of two containers do."""
    one, two = suite.staged(), suite.staged()
    (one._folder / f"new-{one._token}-0").write_bytes(b"what one is writing")
    suite.written(two, ids_of(1))
    assert two.usage().faults == 0 and (one._folder / f"new-{one._token}-0").exists()
    one.close(1.0)
    two.close(1.0)


def test_nothing_is_removed_that_no_store_has_written(suite: Suite) -> None:
    namespace, key = LAYOUT.namespace.hex(), "ab" * 32
    names = ["notes.txt", "new-1-1", "a/b/report", f"{'0' * 64}/notes.txt", f"{namespace}/ab/notes", f"{namespace}/new",
             f"{namespace}/cd/{key}-0", f"{namespace}/ab/{key}-00", f"{namespace}/ab/{key.upper()}-0",
             f"{'0' * 64}/ab/{key}-x", f"{namespace}/ab/{key[:-2]}-0"]  # fmt: skip
    theirs = [suite.folder / name for name in names]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1 << 20))
        os.utime(file, (1.0, 1.0))
    store = suite.staged()
    for number in range(6):
        suite.written(store, ids_of(40, f"text {number}"))
    assert store.usage().evicted
    store.clear()
    store.close(LONGEST_S)
    assert files(suite.folder) == sorted(theirs)


def test_a_folder_that_was_removed_is_made_again(suite: Suite) -> None:
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)
    shutil.rmtree(suite.folder)
    suite.written(store, ids_of(1, "another text"))
    suite.written(store, ids)
    assert suite.read(store, ids) == [record_of(each) for each in ids] and store.usage().faults == 0
    assert suite.folder.stat().st_mode & 0o077 == 0
    store.close(1.0)


def test_a_folder_that_is_removed_during_a_write_is_made_again(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store, replace = ids_of(2), suite.staged(), os.replace

    def remove_first(new: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        shutil.rmtree(suite.folder)
        replace(new, target)

    monkeypatch.setattr(os, "replace", remove_first)
    suite.written(store, ids)
    assert suite.read(store, ids) == [record_of(each) for each in ids] and store.usage().faults == 0
    store.close(1.0)


def test_what_was_counted_before_clear_is_not_found_after_it(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store, found = ids_of(4), suite.staged(), disk.record_files
    suite.written(store, ids)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_remove_all", lambda: None)

        def cleared_meanwhile(root: Path) -> list[tuple[Path, os.stat_result]]:
            listed = list(found(root))
            store.clear()
            return listed

        patch.setattr(disk, "record_files", cleared_meanwhile)
        store._scan()
    assert num_found(store, ids) == 0 and store.usage().records == 0
    store.close(1.0)


def test_what_cannot_be_removed_is_not_found_after_clear_either(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)

    def read_only(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="4 records cannot be removed.*finds them aga"):
        patch.setattr(Path, "unlink", read_only)
        patch.setattr(Path, "touch", read_only)
        store.clear()
        store._writer.submit(store._scan).result(LONGEST_S)
    assert num_found(store, ids) == 0 and len([*suite.folder.rglob("*-[01]")]) == 4
    suite.written(store, ids[:2])
    assert num_found(store, ids) == 2 and suite.read(store, ids[:2]) == [record_of(each) for each in ids[:2]]
    store.close(1.0)


def test_a_clear_whose_engine_was_killed_is_finished_by_the_next(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to forget may be wrong."""
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)

    def killed(*args: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(disk, "record_files", killed)
        store.clear()
        store.close(LONGEST_S)
    again = suite.staged()
    assert num_found(again, ids) == 0 and again.usage().records == 0
    again.close(LONGEST_S)
    assert files(suite.folder) == []


def test_files_that_cannot_be_opened_now_are_not_removed(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)

    def too_many(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_file", too_many)
        assert suite.read(store, ids) == [] and store.usage().faults
    assert num_found(store, ids) == 4 and suite.read(store, ids) == [record_of(each) for each in ids]
    store.close(1.0)


def test_records_are_read_where_nothing_can_be_written(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store = ids_of(4), suite.staged()
    suite.written(store, ids)

    def read_only(*args: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    assert suite.read(store, ids) == [record_of(each) for each in ids]
    store.close(1.0)


def test_a_close_amid_reads_is_silent(suite: Suite, caplog: pytest.LogCaptureFixture) -> None:
    ids, store, may_go = ids_of(16), suite.staged(), threading.Event()
    suite.written(store, ids)
    for _ in range(disk.READERS):
        store._readers.submit(may_go.wait, LONGEST_S)
    store.get(ids, [memoryview(bytearray(LAYOUT.num_bytes[group])) for group, _ in ids])
    store.close(1.0)
    may_go.set()
    assert list(store.poll()) and not caplog.records


def test_files_are_for_this_user_alone(suite: Suite) -> None:
    store = suite.staged()
    suite.written(store, ids_of(4))
    for path in suite.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    store.close(1.0)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ValueError, match=r"kv_store\.disk\.path=.*choose another folder"):
        Suite(open_to_all).make()


def test_what_waits_to_be_written_is_bounded(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_QUEUED", 3 * LAYOUT.num_bytes[0])
    store, may_go, done = suite.staged(), threading.Event(), threading.Semaphore(0)
    write = disk.write_file

    def slow(file: Path, header: bytes, record: memoryview) -> None:
        assert may_go.wait(LONGEST_S)
        write(file, header, record)

    monkeypatch.setattr(disk, "write_file", slow)
    ids = ids_of(12)[::2]
    wanted = [store.put(*each, memoryview(record_of(each)), done.release) for each in ids]
    assert wanted == [True] * 3 + [False] * 3
    may_go.set()
    for _ in range(3):
        assert done.acquire(timeout=LONGEST_S)
    assert num_found(store, ids) == 3
    store.close(1.0)


def test_a_closed_store_keeps_what_was_given_in_time(suite: Suite) -> None:
    ids, store = ids_of(30), suite.staged()
    for each in ids:
        store.put(*each, memoryview(record_of(each)), lambda: None)
    store.close(LONGEST_S)
    again = suite.staged(RecordLayout(LAYOUT.namespace, LAYOUT.num_bytes))
    assert num_found(again, ids) == 30
    again.close(1.0)


def test_a_close_says_how_many_records_were_not_written(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, store, may_go, write = ids_of(6), suite.staged(), threading.Event(), disk.write_file
    monkeypatch.setattr(disk, "write_file", lambda *args: (may_go.wait(LONGEST_S), write(*args)))
    for each in ids:
        assert store.put(*each, memoryview(record_of(each)), lambda: None)
    with pytest.warns(UserWarning, match=r"6 records were not written within 0\.05 s of closing"):
        store.close(0.05)
    may_go.set()
    store._writer.shutdown()
    assert files(suite.folder) == []


def test_the_loop_waits_for_a_slow_file_system_no_longer_however_much_it_is_asked_for(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, store, looks, look = ids_of(200), suite.staged(), list[Path](), disk.status_of

    def slow(file: Path) -> os.stat_result:
        looks.append(file)
        time.sleep(0.02)
        return look(file)

    monkeypatch.setattr(disk, "status_of", slow)
    for again in range(1, 3):
        assert num_found(store, ids) == 0
        assert again <= len(looks) <= again * (disk.MOST_LOOKS_S / 0.02 + 1)
        store.poll()
    store.close(1.0)


def test_the_loop_waits_for_no_file_system(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers nothing until the end of the test."""
    ids, store, answers, done = ids_of(8), suite.staged(), threading.Event(), threading.Event()
    suite.written(store, ids[:4])
    look, replace = disk.status_of, os.replace

    def hang(call: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (answers.wait(), call(*args))[1]

    monkeypatch.setattr(disk, "status_of", hang(look))
    monkeypatch.setattr(os, "replace", hang(replace))
    assert store.put(*ids[4], memoryview(record_of(ids[4])), done.set)
    assert num_found(store, ids) == 4 and store.usage().records == 4
    store.clear()
    assert num_found(store, ids) == 0
    store.close(0.1)
    assert not done.is_set()
    answers.set()
    assert done.wait(LONGEST_S)
    store._writer.shutdown()
    assert files(suite.folder) == []
