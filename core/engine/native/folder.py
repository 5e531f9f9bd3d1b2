"""Where this user's engines keep what takes long to make: compiled kernels, rounded weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def user_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/engine/NAME``, which need not exist; ``~/.cache`` where the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "engine" / name


def unusable(folder: Path) -> str | None:
    """Why nothing can be kept in ``folder``, which is made if need be; ``None``: it can.

    What lies there is executed or computed with, so nobody else may write to it.
    """
    if not folder.is_absolute():
        return f"{folder} is not an absolute path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"{folder} cannot be made: {error}"
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.getuid() or writable_by_others or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} is not a folder that only this user can write to"
    return None
