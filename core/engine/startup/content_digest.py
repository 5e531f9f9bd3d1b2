"""What a checkpoint's files hold, as a SHA-256 digest: equal digests mean equal weights, wherever they lie.

A digest is kept for each file beside what the system says of it (device, inode, size, time of the last change of the
inode, which no program can set), so that a file is read again only after it has changed.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine.checkpoint.files import open_file
from engine.native.folder import open_own, unusable, user_folder
from engine.native.scratch import replacing

MOST_BYTES = 1 << 12
"""Of a file with a kept digest."""
READ_BYTES = 1 << 22
THREADS = 2


FileState = tuple[str, tuple[int, int, int, int]]
"""Of a file in a folder: where it is in it; device, inode, size, ctime in nanoseconds."""


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    status: tuple[int, int, int, int]
    """Device, inode, size, ctime in nanoseconds."""
    digest: str


def content_digest(folder: Path, keep: Path | None = None) -> str:
    """Of all files with weights or settings in a checkpoint's folder and below it (a drafter may ship there).

    ``keep``: where digests of files are kept; ``None``: the user's cache. Hashing takes about 0.7 s a gigabyte and
    thread, off the interpreter's lock. Raises :class:`~engine.checkpoint.files.CheckpointError`, ``OSError``.
    """
    keep = user_folder("digests") if keep is None else keep
    kept = keep if unusable(keep) is None else None
    files = _files(folder)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        digests = list(pool.map(lambda file: _digest(file, kept), files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.relative_to(folder).as_posix()} {digest}\n".encode())
    return whole.hexdigest()


def file_states(folder: Path) -> list[FileState]:
    """Of the same files: each with what the system says of it, which is another after any change."""
    return [(file.relative_to(folder).as_posix(), _status(file)) for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in (".json", ".safetensors"))


def _digest(file: Path, keep: Path | None) -> str:
    with open_file(file) as stream:
        status = _status(stream.fileno())
        target = None if keep is None else keep / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
        digest = "" if target is None else _kept(target, status)
        if digest:
            return digest
        found = hashlib.sha256()
        while part := stream.read(READ_BYTES):
            found.update(part)
        digest = found.hexdigest()
        if target is not None and _status(stream.fileno()) == status:
            _keep(target, _Kept(status, digest))
    return digest


def _status(file: int | Path) -> tuple[int, int, int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def _kept(target: Path, status: tuple[int, int, int, int]) -> str:
    """Empty: the file must be read."""
    try:
        with open_own(target) as opened:
            found = msgspec.json.decode(opened.read(MOST_BYTES), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return ""
    return found.digest if found.status == status else ""


def _keep(target: Path, found: _Kept) -> None:
    try:
        with replacing(target) as new:
            new.write(msgspec.json.encode(found))
    except OSError:
        return  # the next start reads the file again
