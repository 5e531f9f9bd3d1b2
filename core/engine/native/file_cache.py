"""Files that this user's engines keep from one start to the next. What lies there is used only if it is, byte for byte,
what was written.

A file is its content and, after it, the SHA-256 of its name and the content. It is read once, and what was read is
what is loaded. Nothing here fails a start: what cannot be used is built again, what cannot be kept is built at every
start, and a warning says why.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from engine.native.folder import exposed, open_own, unusable, user_folder
from engine.native.scratch import replacing, sweep

DIGEST_BYTES = 32
MOST_BYTES = 1 << 26
"""More than any library has."""
KEEP_S = 30 * 24 * 3600
INSTEAD = "set XDG_CACHE_HOME to a folder that only this user can write to"


def remembered(name: str, make: Callable[[], bytes], anew: bool = False) -> bytes:
    """What ``make`` returned first. Raises what it raises, and keeps nothing then."""
    folder = cache_folder()
    if folder is None:
        return make()
    found = None if anew else _read(folder / name)
    if found is not None:
        return found
    made = make()
    if not anew:
        found = _read(folder / name, warn=False)  # by a process that started at the same time
    if found is None:
        _write(folder / name, made)
    return made if found is None else found


def kept(name: str) -> bytes | None:
    """What is kept under ``name``."""
    folder = cache_folder()
    return None if folder is None else _read(folder / name)


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/engine/native``; ``None``, with a warning, where others could write to it.

    What killed processes left there, and where libraries are compiled, is removed.
    """
    with suppress(OSError):  # no temporary folder: then nothing is compiled, either
        _tidy(Path(tempfile.gettempdir()))
    folder = user_folder("native")
    reason = unusable(folder)
    if reason is not None:
        warnings.warn(f"kernels are compiled and measured anew at every start: {reason}; or {INSTEAD}", stacklevel=2)
        return None
    _tidy(folder)
    return folder


@cache
def _tidy(folder: Path) -> None:
    """Once per process."""
    with suppress(OSError):
        if exposed(folder) is None:
            sweep(folder)


def _read(file: Path, warn: bool = True) -> bytes | None:
    try:
        with open_own(file) as opened:
            whole = opened.read(MOST_BYTES)
        content, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
        if digest == _digest(file, content):
            return content
        reason = "its SHA-256 is not that of what was written"
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error)
    if warn:
        warnings.warn(f"a kept file cannot be used and is made again: {file}: {reason}", stacklevel=2)
    return None


def _write(file: Path, content: bytes) -> None:
    try:
        with replacing(file) as new:
            new.write(content + _digest(file, content))
    except OSError as error:
        warnings.warn(f"{file.name} is made anew at every start: {error}", stacklevel=2)
        return
    _remove_old(file)


def _digest(file: Path, content: bytes) -> bytes:
    """Of the name, too: one kernel's library must not be taken for another's."""
    return hashlib.sha256(f"{file.name}\0".encode() + content).digest()


def _remove_old(file: Path) -> None:
    """Files of the same source and kind that were made long ago."""
    now = time.time()
    for path in file.parent.glob(f"{file.stem.rpartition('-')[0]}-*{file.suffix}"):
        try:
            if path != file and now - path.stat().st_mtime > KEEP_S:
                path.unlink()
        except OSError:  # another process was faster
            continue
