"""Responses in memory: whose they are, how long and how many."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.service import response_rows
from engine.service.database import InUse
from engine.service.errors import ApiError
from engine.service.response_rows import ResponseRows
from engine.service.response_store import (
    ENTRY_BYTES,
    Record,
    ResponseStore,
    StoredTurn,
    joined_items,
    request_of,
    response_id,
)

NOBODY = ("", "")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def item(name: str) -> bytes:
    return json.dumps({"id": name}).encode()


def keep(
    store: ResponseStore,
    name: str,
    before: StoredTurn | None = None,
    owner: str = "a",
    tenant: tuple[str, str] = NOBODY,
) -> StoredTurn:
    record = Record(f"resp_{name}", b"{}", item(f"msg_{name}_0"))
    store.keep(record, item(f"in_{name}"), before, tenant, owner)
    return store.find(record.name, tenant)


def names(store: ResponseStore, *sought: str) -> list[str]:
    """Those that are found."""
    found = []
    for name in sought:
        try:
            found.append(store.find(f"resp_{name}", NOBODY).record.name.removeprefix("resp_"))
        except ApiError as error:
            assert error.kind == "not_found"
    return found


def test_a_turn_has_everything_said_before_it() -> None:
    store = ResponseStore(10**6, 60)
    first = keep(store, "1")
    second = keep(store, "2", first)
    said = [each["id"] for each in json.loads(joined_items(keep(store, "3", second).history()))]
    assert said == ["in_1", "msg_1_0", "in_2", "msg_2_0", "in_3", "msg_3_0"]
    given = [each["id"] for each in json.loads(joined_items(second.given()))]
    assert given == ["in_1", "msg_1_0", "in_2"]


def test_pieces_without_items_leave_no_comma() -> None:
    assert joined_items([b"", b"1,2", b"", b"3"]) == b"[1,2,3]" and joined_items([b""]) == b"[]"


def test_only_its_tenant_finds_a_response() -> None:
    store = ResponseStore(10**6, 60)
    keep(store, "1", tenant=("u", "salt"))
    for tenant in (NOBODY, ("u", ""), ("", "salt"), ("v", "salt")):
        with pytest.raises(ApiError) as error:
            store.find("resp_1", tenant, "previous_response_id")
        assert (error.value.kind, error.value.code) == ("not_found", "previous_response_not_found")
        assert "'resp_1'" in error.value.message and "server.store_s" in error.value.message
        with pytest.raises(ApiError):
            store.forget("resp_1", tenant)
    assert store.find("resp_1", ("u", "salt"))


def test_a_response_is_gone_when_its_time_is_over() -> None:
    clock = Clock()
    store = ResponseStore(10**6, 60, clock)
    keep(store, "1")
    clock.now_s = 30
    keep(store, "2")
    clock.now_s = 59.9
    assert names(store, "1", "2") == ["1", "2"]
    clock.now_s = 60
    assert names(store, "1", "2") == ["2"]
    clock.now_s = 90
    assert names(store, "2") == [] and store.num_bytes == 0


def test_the_client_with_most_bytes_loses_its_oldest_response_first() -> None:
    store = ResponseStore(4 * ENTRY_BYTES + 500, 60)
    keep(store, "0", owner="small")
    for name in "123456":
        keep(store, name, owner="large")
        assert store.num_bytes <= 4 * ENTRY_BYTES + 500
    assert names(store, *"0123456") == ["0", "4", "5", "6"]


def test_what_was_said_before_is_counted_once_and_kept_as_long_as_it_is_needed() -> None:
    store = ResponseStore(10**6, 60)
    first = keep(store, "1")
    alone = store.num_bytes
    second = keep(store, "2", first)
    keep(store, "3", first)
    assert store.num_bytes == 3 * alone
    store.forget("resp_1", NOBODY)
    assert names(store, "1", "2", "3") == ["2", "3"] and store.num_bytes == 3 * alone
    assert len(second.history()) == 4
    store.forget("resp_2", NOBODY)
    assert store.num_bytes == 2 * alone
    store.forget("resp_3", NOBODY)
    assert store.num_bytes == 0


def test_what_was_dropped_while_it_was_answered_is_counted_again() -> None:
    store = ResponseStore(10**6, 60)
    second = keep(store, "2", keep(store, "1"))
    alone = store.num_bytes // 2
    for name in ("resp_1", "resp_2"):
        store.forget(name, NOBODY)
    assert store.num_bytes == 0
    keep(store, "3", second)
    assert store.num_bytes == 3 * alone
    store.forget("resp_3", NOBODY)
    assert store.num_bytes == 0


def test_a_response_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(ENTRY_BYTES, 60)
    store.keep(Record("resp_1", b"{}", b""), b"", None, NOBODY, "a")
    assert names(store, "1") == [] and store.num_bytes == 0


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Seconds since 1970."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


def test_a_server_finds_what_the_one_before_it_stored(tmp_path: Path, wall: Clock) -> None:
    """Whatever was kept, gone on from, deleted, dropped for want of bytes or time: the same, for the same tenants."""
    rng = random.Random(0)
    tenants = [NOBODY, ("u", ""), ("", "salt")]
    turns: list[tuple[str, tuple[str, str], StoredTurn | None]] = []

    def opened() -> ResponseStore:
        return ResponseStore(20 * ENTRY_BYTES, 60, wall, ResponseRows(tmp_path / "responses"))

    def all_of(store: ResponseStore) -> list[Any]:
        found: list[Any] = [store.num_bytes]
        for name, own, _ in turns:
            for tenant in tenants:
                try:
                    turn = store.find(f"resp_{name}", tenant)
                except ApiError:
                    continue
                assert tenant == own
                found.append((name, turn.history(), turn.record, turn.owner))
        return found

    store = opened()
    for number in range(300):
        wall.now_s += rng.expovariate(0.5)
        tenant, before = rng.choice(tenants), None
        mine = [(name, turn) for name, own, turn in turns if own == tenant]
        if mine and rng.random() < 0.7:
            before = rng.choice(mine[-8:])[1]  # its id may be gone: a long answer went on from it
        with suppress(ApiError):  # what it went on from takes all bytes
            turns.append((str(number), tenant, keep(store, str(number), before, rng.choice("ab"), tenant)))
        if rng.random() < 0.2:
            with suppress(ApiError):
                store.forget(f"resp_{rng.choice(mine)[0] if mine else 0}", tenant)
        if rng.random() < 0.1:
            before_it = all_of(store)
            store.close()
            store = opened()
            assert all_of(store) == before_it, number
            turns = [(name, own, turn) for name, own, turn in turns if f"resp_{name}" in store._entries]
            turns = [(name, own, store.find(f"resp_{name}", own)) for name, own, _ in turns]
    wall.now_s += 61
    store.close()
    rows = ResponseRows(tmp_path / "responses")
    with pytest.raises(InUse):
        opened()
    store = ResponseStore(20 * ENTRY_BYTES, 60, wall, rows)
    assert store.num_bytes == 0
    store.close()
    rows = ResponseRows(tmp_path / "responses")
    assert rows.read() == []
    rows.close()
    assert (tmp_path / "responses").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"others can write to .*/responses \(mode 777\): chmod go-w"):
        ResponseRows(folder)


def test_what_was_deleted_while_nothing_could_be_written_is_not_found_again(tmp_path: Path) -> None:
    rows = ResponseRows(tmp_path)
    store = ResponseStore(10**6, 60, rows=rows)
    keep(store, "1")
    keep(store, "2")
    rows._thread.submit(rows._db.execute, "PRAGMA query_only=ON")
    store.forget("resp_1", NOBODY)
    keep(store, "3")
    rows._thread.submit(rows._db.execute, "PRAGMA query_only=OFF")
    store.close()
    store = ResponseStore(10**6, 60, rows=ResponseRows(tmp_path))
    assert names(store, *"123") == ["2"]
    store.close()


def test_a_disk_that_hangs_loses_the_newest_rows_and_finds_nothing_again_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, answers = ResponseRows(tmp_path), threading.Event()
    store = ResponseStore(10**6, 60, rows=rows)
    keep(store, "0")
    rows._thread.submit(int).result(20.0)
    rows._thread.submit(answers.wait, 20.0)
    monkeypatch.setattr(response_rows, "MOST_QUEUED", 4 * ENTRY_BYTES)
    with structlog.testing.capture_logs() as logs:
        for number in range(1, 200):
            keep(store, str(number))
            if number % 2:
                store.forget(f"resp_{number}", NOBODY)
        waiting = rows._thread._work_queue.qsize()
        store.forget("resp_0", NOBODY)
        answers.set()
        rows._thread.submit(int).result(20.0)
        keep(store, "200")
    assert rows.num_dropped == 196 and waiting < 16
    assert [(log["log_level"], log.get("num_dropped")) for log in logs] == [("error", None), ("warning", 196)]
    store.close()
    store = ResponseStore(10**6, 60, rows=ResponseRows(tmp_path))
    assert names(store, *map(str, range(201))) == ["2", "200"]
    store.close()


def test_what_is_no_row_is_a_damaged_file_and_a_conversation_without_a_beginning_is_dropped(tmp_path: Path) -> None:
    def changed(statement: str) -> ResponseStore:
        db = sqlite3.connect(tmp_path / "responses.db")
        with db:
            db.execute(statement)
        db.close()
        rows = ResponseRows(tmp_path)
        try:
            return ResponseStore(10**6, 60, rows=rows)
        finally:
            rows.close()

    store = ResponseStore(10**6, 60, rows=ResponseRows(tmp_path))
    keep(store, "2", keep(store, "1"))
    store.close()
    with pytest.raises(sqlite3.DatabaseError, match=r"a row of responses.db is damaged: .*null"):
        changed("UPDATE turns SET owner = NULL WHERE name = 'resp_1'")
    assert names(changed("UPDATE turns SET owner = 'a', before = 'resp_2'"), "1", "2") == []
    with pytest.raises(sqlite3.DatabaseError, match="no such column: until"):
        changed("ALTER TABLE turns RENAME COLUMN until TO later")


def test_the_id_of_an_item_names_its_response() -> None:
    store = ResponseStore(10**6, 60)
    turn = keep(store, "1", tenant=("", "salt"))
    assert store.of_item("msg_1_0", ("", "salt"), "input[0]") is turn
    assert {name: bytes(found) for name, found in turn.outputs().items()} == {"msg_1_0": item("msg_1_0")}
    for name, tenant in (("msg_1_0", NOBODY), ("msg", NOBODY), ("", NOBODY)):
        with pytest.raises(ApiError) as error:
            store.of_item(name, tenant, "input[0]")
        assert (error.value.kind, error.value.param) == ("not_found", "input[0]")


def test_the_id_of_a_response_is_its_requests_and_a_secret() -> None:
    request = "resp_" + "0123456789abcdef" * 2
    one, two = response_id(request), response_id(request)
    assert one != two and one.startswith(request) and len(one) == len(request) + 16
    assert request_of(one) == request_of(request) == request
    assert request_of("chatcmpl-" + "a" * 60) == "chatcmpl-" + "a" * 60
