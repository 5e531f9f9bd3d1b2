"""Where this user's engines keep what takes long to make: compiled kernels, rounded weights.

What lies there is executed or computed with. So nobody else may write to it or put something else in its place: not to
the folder, not to a file in it, and not to any folder on the way there.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MOST_LINKS = 40
"""Symbolic links in one path, as the system has it."""


def user_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/engine/NAME``, which need not exist; ``~/.cache`` where the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "engine" / name


def unusable(folder: Path) -> str | None:
    """Why nothing can be kept in ``folder``, which is made if need be; ``None``: it can."""
    if not folder.is_absolute():
        return f"{folder} is not an absolute path"
    try:
        reason = exposed(folder)
        status = folder.stat() if reason is None else None
    except OSError as error:
        return f"{folder} cannot be made: {error}"
    if status is not None:
        reason = _not_own(folder, status)
        if reason is None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            reason = f"{folder} cannot be written to"
    return None if reason is None else f"{folder} cannot be used: {reason}"


def exposed(folder: Path) -> str | None:
    """Who else could put another folder in the place of ``folder``; ``None``: only this user and root.

    Folders that are missing are made, for this user alone. Raises ``OSError``.
    """
    trusted = {0, os.geteuid()}
    for step, status in _way(folder):
        if status.st_uid not in trusted:
            return f"{step} belongs to user {status.st_uid}, expected {' or '.join(map(str, sorted(trusted)))}"
        if stat.S_ISLNK(status.st_mode):
            continue
        if not stat.S_ISDIR(status.st_mode):
            return f"{step} is no folder"
        # In a folder with the sticky bit, as /tmp is, nobody can rename what belongs to others.
        if _others_can_write(status) and not status.st_mode & stat.S_ISVTX:
            return _writable(step, status)
    return None


def open_own(file: Path) -> BufferedReader:
    """``file`` for reading, opened once: what is checked is what is read.

    Raises ``OSError``, also for links and whatever else is no file, for files of other users, and for those that others
    can write to.
    """
    # Not blocking: opening a pipe would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        reason = _not_own(file, status) if stat.S_ISREG(status.st_mode) else f"{file} is no regular file"
        if reason is not None:
            raise PermissionError(reason)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _way(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and every link on the way to ``folder``. The next one is looked at, or made if it is missing, after
    the last one was handed out: whoever stops makes nothing in a folder of others."""
    at, names, num_links = Path("/"), list(reversed(folder.parts[1:])), 0
    yield at, at.lstat()
    while names:
        step = at / names.pop()
        try:
            status = step.lstat()
        except FileNotFoundError:
            step.mkdir(mode=0o700, exist_ok=True)
            status = step.lstat()
        yield step, status
        if stat.S_ISLNK(status.st_mode):
            num_links += 1
            if num_links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = Path(os.readlink(step))
            at = Path("/") if target.is_absolute() else at
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        else:
            at = step


def _not_own(path: Path, status: os.stat_result) -> str | None:
    """Why it is not this user's alone."""
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, expected {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return _writable(path, status)
    return None


def _writable(path: Path, status: os.stat_result) -> str:
    return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w {path}"


def _others_can_write(status: os.stat_result) -> bool:
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)
    return by_group or bool(status.st_mode & stat.S_IWOTH)


def _is_private(gid: int) -> bool:
    """Whether the group is this user's alone. Where each user has such a group, folders are made writable to it. Root's
    never counts: containers run other users in it, whom no file lists."""
    if os.geteuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    members = {*group.gr_mem, *(one.pw_name for one in pwd.getpwall() if one.pw_gid == gid)}
    return group.gr_name == user.pw_name and members <= {user.pw_name}
