"""Unfinished files: in a folder that only this user can look into and that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX, LOCK = "engine-scratch-", "lock"
OURS = re.compile(rf"{PREFIX}\w+")
TRIES = 100


@contextmanager
def scratch_folder(parent: Path) -> Iterator[int]:
    """A new folder in ``parent``, removed at the end. Raises ``OSError``.

    A descriptor: what is looked up in it is looked up in that very folder, even if somebody who can write to ``parent``
    has put another one in its place.
    """
    with ExitStack() as held:
        yield _make(parent, held)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file for this user alone, which takes the place of ``target`` at the end: whole or not at all.

    Raises ``OSError``.
    """
    with scratch_folder(target.parent) as folder:
        descriptor = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(descriptor, "wb") as file:
            yield file
        os.replace("new", target, src_dir_fd=folder)


def sweep(parent: Path) -> None:
    """Remove what killed processes of this user left in ``parent``, in which nobody else may be able to rename."""
    with suppress(OSError):
        for name in filter(OURS.fullmatch, os.listdir(parent)):
            with suppress(OSError):  # its process is alive, or another one is faster
                _remove(parent / name)


def _make(parent: Path, held: ExitStack) -> int:
    """Locked for as long as its process lives. :func:`_remove` may take it away before it is: then another one."""
    for _ in range(TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held.callback(_remove_empty, path)
        try:
            folder = _open(held, path, os.O_RDONLY | os.O_DIRECTORY)
            if os.fstat(folder).st_uid != os.geteuid() or os.listdir(folder):  # not the one that was just made
                continue
            lock = _open(held, LOCK, os.O_RDWR | os.O_CREAT, folder)
        except FileNotFoundError:
            continue
        if _is_locked(lock):
            held.callback(_empty, folder)
            return folder
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(parent / PREFIX))


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: there, nothing is ever swept
        return True
    return os.fstat(lock).st_nlink > 0


def _remove(path: Path) -> None:
    """Unless its process is alive. Raises ``OSError``."""
    with ExitStack() as held:
        folder = _open(held, path, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(folder).st_uid == os.geteuid():
            held.callback(_remove_empty, path)
            fcntl.flock(_open(held, LOCK, os.O_RDWR, folder), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)


def _open(held: ExitStack, path: Path | str, flags: int, folder: int | None = None) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    held.callback(os.close, descriptor)
    return descriptor


def _empty(folder: int) -> None:
    """The lock goes last: what a killed process leaves of this is swept, too."""
    for name in sorted(os.listdir(folder), key=LOCK.__eq__):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()
