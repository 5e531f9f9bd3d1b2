"""A SQLite database in a folder that one process has alone."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path


class InUse(Exception):
    """Another process has the folder."""


def open_alone(folder: Path, name: str, schema: str, *pragmas: str) -> tuple[sqlite3.Connection, int]:
    """The database, a file that this user alone may read and that is no link, and the descriptor that holds the folder
    until it is closed. ``pragmas``: beside write-ahead logging. Raises ``OSError``, :class:`InUse`,
    ``sqlite3.Error``."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchmod(file, 0o600)
        os.close(file)
        database = sqlite3.connect(folder / name, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", *pragmas):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(schema)
    except BlockingIOError:
        os.close(lock)
        raise InUse from None
    except BaseException:
        os.close(lock)
        raise
    return database, lock
