"""Where files and batches lie: one folder, with a SQLite database of all that is known and the files' bytes beside it.

A line's result is in the database before anybody is told of it, at most once; files of results are written from there.
So whatever ends the process, and whenever: what is in the database is all there is, and what is not is done again.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.service.batches.lines import Line, unanswered_line
from engine.service.batches.records import OVER, Batch, File, Status
from engine.service.database import open_alone
from engine.service.errors import ApiError

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT, purpose TEXT, bytes INTEGER, record BLOB);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT, status TEXT, record BLOB);
CREATE TABLE IF NOT EXISTS lines (batch TEXT, number INTEGER, custom_id TEXT, start INTEGER, size INTEGER,
    PRIMARY KEY (batch, number));
CREATE TABLE IF NOT EXISTS results (batch TEXT, number INTEGER, is_ok INTEGER, line BLOB, PRIMARY KEY (batch, number));
"""
DATABASE = "batches.db"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Nothing can be written now."""
MOST_FILES = 10_000
"""Of a tenant: an empty one takes room, too."""
MOST_OVER = 1_000
"""Batches of a tenant that are over: those that ended first are forgotten, their files are not."""
SLICE = 500
"""Rows that are taken into memory at a time."""

R = TypeVar("R", File, Batch)


class DiskFull(Exception):
    """The disk takes nothing more; what was to be written is not, none of it. The same may be tried again."""


@contextmanager
def writing() -> Iterator[None]:
    """Turns what a full disk raises into :class:`DiskFull`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise DiskFull(str(error)) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull(error.strerror) from None


def now() -> int:
    """Seconds since 1970: what is kept must mean the same after a restart."""
    return int(time.time())


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


class Store:
    """Use on one thread at a time. What is given a ``tenant`` finds that one's alone."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, if need be. Raises as :func:`~engine.service.database.open_alone`."""
        self.folder = folder
        self._files = folder / "files"
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db, self._lock = open_alone(folder, DATABASE, SCHEMA, "synchronous=FULL")
        self._sweep()

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    # Files

    def path(self, file: str) -> Path:
        return self._files / file

    def new_path(self) -> Path:
        """Where a file is written before it is taken; what nobody takes is removed at the next start."""
        return self._files / new_id("part-")

    def take(self, written: Path, tenant: str, filename: str) -> File:
        """Add an uploaded file."""
        file = File(new_id("file-"), tenant, filename, "batch", written.stat().st_size, now())
        written.rename(self.path(file.id))
        try:
            self._sync_folder()
            with self._transaction():
                self._put_file(file)
        except BaseException:
            self.path(file.id).unlink(missing_ok=True)
            raise
        return file

    def files(self, tenant: str, purpose: str | None, after: str | None, limit: int, is_ascending: bool) -> list[File]:
        """At most ``limit`` + 1: whether there are more is seen by that one."""
        where, values = ("AND purpose = ?", [purpose]) if purpose else ("", [])
        return self._page(File, "files", where, [tenant, *values], after, limit, is_ascending)

    def file(self, name: str, tenant: str) -> File:
        """Raises :class:`ApiError` ``not_found``."""
        return self._one(File, "files", name, tenant, "file")

    def bytes_of(self, tenant: str) -> int:
        """Of all files of a tenant."""
        (size,) = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", [tenant]).fetchone()
        return int(size)

    def has_room(self, tenant: str) -> bool:
        """Whether a tenant may have a further file."""
        (count,) = self._db.execute("SELECT count(*) FROM files WHERE tenant = ?", [tenant]).fetchone()
        return int(count) < MOST_FILES

    def forget(self, name: str, tenant: str) -> None:
        """Raises :class:`ApiError` ``not_found``, ``conflict`` for the file of a batch that is not over."""
        self.file(name, tenant)
        if used := [batch.id for batch in self.unfinished() if batch.input_file_id == name]:
            raise ApiError("conflict", f"{used[0]} reads this file; cancel the batch first.", code="file_in_use")
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", [name])
        self.path(name).unlink(missing_ok=True)

    # Batches

    def add(self, batch: Batch) -> None:
        with self._transaction():
            self._db.execute("INSERT INTO batches VALUES (?, ?, '', '')", [batch.id, batch.tenant])
            self._put(batch)
            over = f"""SELECT rowid FROM batches WHERE tenant = ? AND status IN {OVER}
                ORDER BY json_extract(CAST(record AS TEXT), '$.times.' || status || '_at') DESC, rowid DESC
                LIMIT -1 OFFSET ?"""
            self._db.execute(f"DELETE FROM batches WHERE rowid IN ({over})", [batch.tenant, MOST_OVER])

    def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """As :meth:`files`, the latest first."""
        return self._page(Batch, "batches", "", [tenant], after, limit, False)

    def batch(self, name: str, tenant: str) -> Batch:
        """Raises :class:`ApiError` ``not_found``."""
        return self._one(Batch, "batches", name, tenant, "batch")

    def unfinished(self) -> list[Batch]:
        """Of all tenants, the first one first."""
        query = f"SELECT record FROM batches WHERE status NOT IN {OVER} ORDER BY rowid"
        return [msgspec.json.decode(record, type=Batch) for (record,) in self._db.execute(query)]

    def change(self, name: str, was: Status, status: Status, **fields: object) -> Batch:
        """Bring a batch to another state, with the time. One that is no longer what it ``was`` stays as it is."""
        with self._transaction():
            batch = self._get(name)
            if batch.status != was:
                return batch
            times = batch.times | {f"{status}_at": now()}
            changed = msgspec.structs.replace(batch, status=status, times=times, **fields)
            self._put(changed)
        return changed

    def cancel(self, name: str, tenant: str) -> Batch:
        """Raises :class:`ApiError` ``not_found``, ``conflict`` for one that is over."""
        batch = self.batch(name, tenant)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.is_over or batch.status == "finalizing":
            raise ApiError("conflict", f"The batch is {batch.status}; it cannot be cancelled.", code="batch_over")
        return self.change(name, batch.status, "cancelling", ends_as="cancelled")

    # Lines

    def begin(self, name: str) -> None:
        """A batch has no lines yet: those of a validation that did not end are gone."""
        with self._transaction():
            self._db.execute("DELETE FROM lines WHERE batch = ?", [name])

    def add_lines(self, name: str, lines: Sequence[Line]) -> None:
        with self._transaction():
            rows = [(name, line.number, line.custom_id, line.start, line.size) for line in lines]
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", rows)

    def open_lines(self, name: str, after: int = 0, limit: int = SLICE) -> list[Line]:
        """The next lines without a result, by number."""
        query = """SELECT number, custom_id, start, size FROM lines WHERE batch = ? AND number > ? AND NOT EXISTS
            (SELECT 1 FROM results WHERE batch = lines.batch AND number = lines.number) ORDER BY number LIMIT ?"""
        return [Line(*row) for row in self._db.execute(query, [name, after, limit])]

    def read(self, file: str, line: Line) -> bytes:
        """Raises ``OSError``."""
        with open(self.path(file), "rb") as opened:
            return os.pread(opened.fileno(), line.size, line.start)

    def save(self, results: Sequence[tuple[str, int, bool, bytes]]) -> None:
        """Of each line (batch, number) whether it went well, and its line of the output. All of them are kept, or none.
        A line that has a result keeps that one."""
        with self._transaction():
            counted = Counter[tuple[str, bool]]()
            for name, number, is_ok, line in results:
                query = """INSERT OR IGNORE INTO results SELECT batch, number, ?, ? FROM lines
                    WHERE batch = ? AND number = ?"""
                counted[name, is_ok] += self._db.execute(query, [is_ok, line, name, number]).rowcount
            for name in {name for (name, _), count in counted.items() if count}:
                batch = self._get(name)
                completed, failed = batch.completed + counted[name, True], batch.failed + counted[name, False]
                self._put(msgspec.structs.replace(batch, completed=completed, failed=failed))

    def give_up(self, name: str, code: str, message: str, after: int = 0) -> int:
        """The next lines without a result, by number, get one that says why. Returns the last one; 0: there was
        none."""
        lines = self.open_lines(name, after)
        self.save([(name, line.number, False, unanswered_line(name, line, code, message)) for line in lines])
        return lines[-1].number if lines else 0

    def finish(self, name: str) -> Batch:
        """Write the files of a batch's results, and end it."""
        batch, written = self._get(name), dict[str, File]()
        if batch.is_over:
            return batch
        try:
            for is_ok, kind in ((True, "output"), (False, "error")):
                if (file := self._write(batch, is_ok, kind)) is not None:
                    written[kind] = file
            self._sync_folder()
            with self._transaction():
                for file in written.values():
                    self._put_file(file)
                self._db.execute("DELETE FROM lines WHERE batch = ?", [name])
                self._db.execute("DELETE FROM results WHERE batch = ?", [name])
                ids = {kind: file.id for kind, file in written.items()}
                batch = msgspec.structs.replace(
                    batch,
                    status=batch.ends_as,
                    times=batch.times | {f"{batch.ends_as}_at": now()},
                    output_file_id=ids.get("output"),
                    error_file_id=ids.get("error"),
                )
                self._put(batch)
        except BaseException:
            for file in written.values():
                self.path(file.id).unlink(missing_ok=True)
            raise
        return batch

    def _write(self, batch: Batch, is_ok: bool, kind: str) -> File | None:
        """``None``: it would be empty."""
        query = "SELECT line FROM results WHERE batch = ? AND is_ok = ? ORDER BY number"
        part, size = self.new_path(), 0
        try:
            with writing(), open(part, "wb") as file:
                for (line,) in self._db.execute(query, [batch.id, is_ok]):
                    size += file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        if not size:
            part.unlink()
            return None
        found = File(new_id("file-"), batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", size, now())
        part.rename(self.path(found.id))
        return found

    # Rows

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Raises :class:`DiskFull`."""
        with writing():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _put_file(self, file: File) -> None:
        row = [file.id, file.tenant, file.purpose, file.bytes, msgspec.json.encode(file)]
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", row)

    def _put(self, batch: Batch) -> None:
        values = [batch.status, msgspec.json.encode(batch), batch.id]
        self._db.execute("UPDATE batches SET status = ?, record = ? WHERE id = ?", values)

    def _get(self, name: str) -> Batch:
        (record,) = self._db.execute("SELECT record FROM batches WHERE id = ?", [name]).fetchone()
        return msgspec.json.decode(record, type=Batch)

    def _one(self, kind: type[R], table: str, name: str, tenant: str, what: str) -> R:
        query = f"SELECT record FROM {table} WHERE id = ? AND tenant = ?"
        row = self._db.execute(query, [name, tenant]).fetchone()
        if row is None:
            raise ApiError("not_found", f"There is no {what} {name[:64]!r}.", code=f"{what}_not_found")
        return msgspec.json.decode(row[0], type=kind)

    def _page(
        self, kind: type[R], table: str, where: str, values: list[str], after: str | None, limit: int, up: bool
    ) -> list[R]:
        """``after``: an id; one that there is not raises :class:`ApiError` ``not_found``."""
        if after is not None:
            self._one(kind, table, after, values[0], kind.__name__.lower())
            where += f" AND rowid {'>' if up else '<'} (SELECT rowid FROM {table} WHERE id = ?)"
            values = [*values, after]
        query = f"SELECT record FROM {table} WHERE tenant = ? {where} ORDER BY rowid {'ASC' if up else 'DESC'} LIMIT ?"
        return [msgspec.json.decode(row, type=kind) for (row,) in self._db.execute(query, [*values, limit + 1])]

    def _sweep(self) -> None:
        """Remove files that the database does not have: an upload, or a deletion, did not end."""
        known = {name for (name,) in self._db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()

    def _sync_folder(self) -> None:
        """What was renamed in there is so after a power cut, too."""
        folder = os.open(self._files, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
