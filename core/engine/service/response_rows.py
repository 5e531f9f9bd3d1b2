"""Stored responses in a folder, so that they outlive the server: one SQLite database, a row for each turn.

Rows are written by a thread, in order, behind the memory that answers; a killed server loses the last of them.
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
        self._fails = False
        self._missed = deque[tuple[str, Sequence[object]]]()
        """Statements that forget something, and could not be executed: they are tried again."""

    def read(self) -> list[Row]:
        """All that there are. Raises ``sqlite3.Error`` where the file is damaged, or of another program."""
        try:
            return msgspec.convert(self._db.execute(f"SELECT {COLUMNS} FROM turns").fetchall(), list[Row])
        except msgspec.ValidationError as error:
            raise sqlite3.DatabaseError(f"a row of {DATABASE} is damaged: {error}") from None

    def put(self, row: Row) -> None:
        """Also in the place of one of the same name."""
        places = ", ".join("?" * len(row.__struct_fields__))
        self._do(f"INSERT OR REPLACE INTO turns ({COLUMNS}) VALUES ({places})", msgspec.structs.astuple(row))

    def know(self, name: str, tenant: tuple[str, str], until: float) -> None:
        """From now on its id is known to a tenant for so long; 0: to nobody, and others may go on from it."""
        self._do("UPDATE turns SET user = ?, salt = ?, until = ? WHERE name = ?", (*tenant, until, name))

    def remove(self, name: str) -> None:
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
