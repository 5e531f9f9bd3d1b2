"""Compiled kernels on disk. What lies there is executed only if it is, byte for byte, what was written.

A file is the library and, behind it, the SHA-256 of its name and the library. It is read once, and what was read is
what is loaded. Nothing here fails a start: what cannot be used is built again, what cannot be kept is built at every
start, and a warning says why.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from engine.native.compiler import Compiler
from engine.native.folder import exposed, open_own, unusable, user_folder
from engine.native.scratch import replacing, sweep

DIGEST_BYTES = 32
MOST_BYTES = 1 << 26
"""More than any library has."""
KEEP_S = 30 * 24 * 3600
INSTEAD = "set XDG_CACHE_HOME to a folder that only this user can write to"


def build(compiler: Compiler, source: Path, anew: bool = False) -> bytes:
    """The shared library of ``source``: as kept, unless it is to be built ``anew``. Raises :class:`NativeError`."""
    folder = cache_folder()
    if folder is None:
        return compiler.compile(source)
    file = folder / f"{source.stem}-{compiler.key(source)}.so"
    kept = None if anew else _read(file)
    if kept is not None:
        return kept
    built = compiler.compile(source)
    _write(file, built)
    return built


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/engine/native``; ``None``, with a warning, where others could write to it.

    What killed processes left there, and where libraries are compiled, is removed.
    """
    with suppress(OSError):  # no temporary folder: then nothing is compiled, either
        _tidy(Path(tempfile.gettempdir()))
    folder = user_folder("native")
    reason = unusable(folder)
    if reason is not None:
        warnings.warn(f"kernels are compiled anew at every start: {reason}; or {INSTEAD}", stacklevel=2)
        return None
    _tidy(folder)
    return folder


@cache
def _tidy(folder: Path) -> None:
    """Once per process."""
    with suppress(OSError):
        if exposed(folder) is None:
            sweep(folder)


def _read(file: Path) -> bytes | None:
    try:
        with open_own(file) as opened:
            content = opened.read(MOST_BYTES)
        library, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if digest == _digest(file, library):
            return library
        reason = "its SHA-256 is not that of what was written"
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error)
    warnings.warn(f"a kept kernel library cannot be used and is built again: {file}: {reason}", stacklevel=2)
    return None


def _write(file: Path, library: bytes) -> None:
    try:
        with replacing(file) as new:
            new.write(library + _digest(file, library))
    except OSError as error:
        warnings.warn(f"{file.name} is compiled anew at every start: {error}", stacklevel=2)
        return
    _remove_old(file)


def _digest(file: Path, library: bytes) -> bytes:
    """Of the name, too: one kernel's library must not be taken for another's."""
    return hashlib.sha256(f"{file.name}\0".encode() + library).digest()


def _remove_old(file: Path) -> None:
    """Libraries of the same source that were built long ago."""
    now = time.time()
    for path in file.parent.glob(f"{file.stem.rpartition('-')[0]}-*.so"):
        try:
            if path != file and now - path.stat().st_mtime > KEEP_S:
                path.unlink()
        except OSError:  # another process was faster
            continue
