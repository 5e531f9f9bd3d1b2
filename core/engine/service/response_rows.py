"""Stored responses in a folder, so that they outlive the server: one SQLite database, a row for each turn.

Rows are written by a thread, in order, behind the memory that answers; a killed server loses the last of them. Where
the disk hangs, rows that come when too many wait are dropped, and a restart drops what goes on from them.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from engine.native.folder import unusable
from engine.service.database import open_alone

SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (name TEXT PRIMARY KEY, before TEXT, user TEXT, salt TEXT, owner TEXT, until REAL,
    response BLOB, items BLOB, outputs BLOB);
"""
DATABASE = "responses.db"
MOST_QUEUED = 64 * 1024**2
"""Bytes of rows that wait to be written, at most, or one row: what comes then is dropped."""
ROW_BYTES = 1024
"""That a row takes beside its texts."""
log = structlog.get_logger("engine.responses")


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A turn, as it lies there."""

    name: str
    before: str
    """The name of the turn that it went on from; empty: it began."""
    user: str
    salt: str
    owner: str
    until: float
    """Its own id is known for so long, in seconds since 1970."""
    response: bytes
    items: bytes
    outputs: bytes

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES + len(self.response) + len(self.items) + len(self.outputs)


COLUMNS = ", ".join(Row.__struct_fields__)


class ResponseRows:
    """Whoever has the folder open has it alone. :meth:`close` waits for what is still being written."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, if need be, for this user alone. Raises as
        :func:`~engine.service.database.open_alone`, and ``PermissionError`` where others can write to it or put
        another in its place."""
        if reason := unusable(folder):
            raise PermissionError(reason)
        self._db, self._lock = open_alone(folder, DATABASE, SCHEMA, "synchronous=NORMAL", "secure_delete=ON")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._fails = self._fills = False
        self._missed = deque[tuple[str, Sequence[object]]]()
        """Statements that forget something, and could not be executed: they are tried again."""
        self._put_bytes = self._done_bytes = 0
        """Of rows that were to be written so far, and of those that the thread is done with."""
        self._dropped = set[str]()
        """Names of rows that were dropped, until they are removed."""
        self.num_dropped = 0
        """Rows, so far."""

    def read(self) -> list[Row]:
        """All that there are. Raises ``sqlite3.Error`` where the file is damaged, or of another program."""
        try:
            return msgspec.convert(self._db.execute(f"SELECT {COLUMNS} FROM turns").fetchall(), list[Row])
        except msgspec.ValidationError as error:
            raise sqlite3.DatabaseError(f"a row of {DATABASE} is damaged: {error}") from None

    def put(self, row: Row) -> None:
        """Also in the place of one that was removed. It is dropped where too many wait to be written."""
        waiting = self._put_bytes - self._done_bytes
        if waiting and waiting + row.num_bytes > MOST_QUEUED:
            self._drop(row.name, waiting)
            return
        if self._fills:
            log.warning("stored responses are written again", num_dropped=self.num_dropped)
        self._fills = False
        self._put_bytes += row.num_bytes
        values = ", ".join("?" * len(row.__struct_fields__))
        statement = f"INSERT OR REPLACE INTO turns ({COLUMNS}) VALUES ({values})"
        self._thread.submit(self._put, statement, row)

    def _put(self, statement: str, row: Row) -> None:
        try:
            self._execute(statement, msgspec.structs.astuple(row))
        finally:
            self._done_bytes += row.num_bytes

    def _drop(self, name: str, waiting_bytes: int) -> None:
        self._dropped.add(name)
        self.num_dropped += 1
        if not self._fills:
            log.error(
                "new stored responses are not written, a restart will not find them: too many wait for the disk",
                waiting_bytes=waiting_bytes,
            )
        self._fills = True

    def know(self, name: str, tenant: tuple[str, str], until: float) -> None:
        """From now on its id is known to a tenant for so long; 0: to nobody, and others may go on from it."""
        if name not in self._dropped:
            self._do("UPDATE turns SET user = ?, salt = ?, until = ? WHERE name = ?", (*tenant, until, name))

    def remove(self, name: str) -> None:
        if name in self._dropped:
            self._dropped.remove(name)
        else:
            self._do("DELETE FROM turns WHERE name = ?", (name,))

    def close(self) -> None:
        self._do("SELECT 1", ())
        self._thread.shutdown()
        self._db.close()
        os.close(self._lock)

    def _do(self, statement: str, values: Sequence[object]) -> None:
        self._thread.submit(self._execute, statement, values)

    def _execute(self, statement: str, values: Sequence[object]) -> None:
        try:
            while self._missed:
                self._db.execute(*self._missed[0])
                self._missed.popleft()
            self._db.execute(statement, values)
            self._fails = False
        except sqlite3.Error as error:  # what a restart finds is older than it could be
            if not statement.startswith("INSERT"):
                self._missed.append((statement, values))
            if not self._fails:
                log.error("stored responses cannot be written", error=str(error))
            self._fails = True
