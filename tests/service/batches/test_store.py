"""What is kept of files and batches, whatever ends the process and however full the disk is."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.service.batches import store as store_module
from engine.service.batches.lines import Line, unanswered_line
from engine.service.batches.records import Batch
from engine.service.batches.store import SLICE, DiskFull, Store, writing
from engine.service.database import InUse
from engine.service.errors import ApiError

KILLED = """
import os, sys
from pathlib import Path
from engine.service.batches.store import Store

store = Store(Path(sys.argv[1]))
print("open", flush=True)
while lines := store.open_lines("b", limit=3):
    store.save([("b", line.number, line.number % 7 != 0, line.custom_id.encode()) for line in lines])
    print(lines[-1].number, flush=True)
store.change("b", "in_progress", "finalizing")
store.finish("b")
print("done", flush=True)
"""


def batch(store: Store, total: int, name: str = "b") -> None:
    part = store.new_path()
    part.write_bytes(b"x")
    file = store.take(part, "t", "in.jsonl")
    store.add(Batch(name, "t", "m", "/v1/x", file.id, 1, 2))
    store.add_lines(name, [Line(number, f"n{number}", 0, 1) for number in range(1, total + 1)])
    store.change(name, "validating", "in_progress", total=total)


def outputs(store: Store, name: str = "b") -> list[str]:
    found = store.batch(name, "t")
    files = [store.path(file) for file in (found.output_file_id, found.error_file_id) if file]
    return [line for file in files for line in file.read_text().splitlines()]


def test_killed_at_any_moment_each_line_is_in_the_outputs_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 100)
    store.close()
    for last in ("9", "30", "99", "done"):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        seen = [line.strip() for line in iter(process.stdout.readline, f"{last}\n")] if last != "done" else []
        if last == "done":
            process.wait()
        else:
            assert seen[0] == "open"
            process.send_signal(signal.SIGKILL)
            process.wait()
        process.stdout.close()
    store = Store(tmp_path)
    assert Counter(outputs(store)) == Counter(f"n{number}" for number in range(1, 101))
    done = store.batch("b", "t")
    assert (done.status, done.completed, done.failed) == ("completed", 86, 14)


def test_a_second_result_of_a_line_is_no_result(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 2)
    store.save([("b", 1, True, b"first"), ("b", 1, True, b"again"), ("b", 9, True, b"no such line")])
    store.save([("b", 1, False, b"later")])
    found = store.batch("b", "t")
    assert (found.completed, found.failed) == (1, 0) and [line.number for line in store.open_lines("b")] == [2]
    store.give_up("b", "batch_expired", "Too late.")
    store.change("b", "in_progress", "finalizing", ends_as="expired")
    ended = store.finish("b")
    assert outputs(store) == ["first", unanswered_line("b", Line(2, "n2", 0, 1), "batch_expired", "Too late.").decode()]
    assert json.loads(outputs(store)[1])["response"] is None and ended.status == "expired"
    assert store.finish("b") == ended == store.change("b", "in_progress", "finalizing")
    store.save([("b", 2, True, b"too late")])
    assert store.batch("b", "t") == ended


def test_what_does_not_fit_on_the_disk_is_not_kept_and_can_be_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 4)
    store.save([("b", 1, True, b"1")])
    results = [("b", number, True, b"x" * 100_000) for number in (2, 3, 4)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = (tmp_path / "batches.db-wal").stat().st_size + 8192
    resource.setrlimit(resource.RLIMIT_FSIZE, (small, before[1]))  # Python ignores the signal of it
    try:
        with pytest.raises(DiskFull):
            store.save(results)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [line.number for line in store.open_lines("b")] == [2, 3, 4]
    assert store.batch("b", "t").completed == 1
    store.save(results)
    assert store.batch("b", "t").completed == 4


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(InUse):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_what_was_not_taken_is_removed_at_the_next_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 1)
    part = store.new_path()
    part.write_bytes(b"half of an upload")
    (kept,) = store.files("t", None, None, 10, True)
    store.close()
    store = Store(tmp_path)
    assert not part.exists() and store.path(kept.id).read_bytes() == b"x"


def test_a_file_goes_once_no_batch_reads_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 1)
    name = store.batch("b", "t").input_file_id
    with pytest.raises(ApiError, match="cancel the batch first"):
        store.forget(name, "t")
    store.cancel("b", "t")
    store.finish("b")
    store.forget(name, "t")
    assert not store.path(name).exists() and store.bytes_of("t") == 0
    with pytest.raises(ApiError, match="There is no file"):
        store.file(name, "t")


def test_a_disk_that_fails_otherwise_is_no_full_disk() -> None:
    with pytest.raises(FileNotFoundError), writing():
        Path("/no/such/file").read_bytes()


def test_a_file_that_cannot_be_noted_leaves_no_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    part = store.new_path()
    part.write_bytes(b"x")
    store._db.execute("PRAGMA max_page_count=1")
    with pytest.raises(DiskFull):
        for _ in range(1000):
            part.write_bytes(b"x")
            store.take(part, "t", "n" * 255)
    known = {file.id for file in store.files("t", None, None, 1000, True)}
    assert {path.name for path in tmp_path.glob("files/*")} == known
    store.close()


def test_lines_that_nobody_answers_are_given_up_slice_by_slice_and_each_is_counted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch(store, 2 * SLICE + 3)
    store.save([("b", 1, True, b"{}"), ("b", 2, False, b"{}"), ("b", 1, False, b"{}")])
    counted, last = [], 0
    while last := store.give_up("b", "batch_cancelled", "why", last):
        found = store.batch("b", "t")
        counted.append((found.completed, found.failed))
    assert counted == [(1, SLICE + 1), (1, 2 * SLICE + 1), (1, 2 * SLICE + 2)]
    store.close()


def test_what_a_tenant_keeps_has_a_limit_in_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_FILES", 4)
    monkeypatch.setattr(store_module, "MOST_OVER", 2)
    store = Store(tmp_path)
    seconds = itertools.count(100)
    monkeypatch.setattr(store_module, "now", lambda: next(seconds))
    for name in ("a", "b", "c"):
        batch(store, 0, name)
        assert store.has_room("t")
    for name in ("b", "c", "a"):
        store.cancel(name, "t")
        store.finish(name)
    batch(store, 1, "d")
    assert not store.has_room("t") and store.has_room("another")
    assert [each.id for each in store.batches("t", None, 9)] == ["d", "c", "a"], "b ended first"
    store.save([("b", 1, True, b"late"), ("d", 1, True, b"in time")])  # b is forgotten
    assert store.batch("d", "t").completed == 1
    store.close()
