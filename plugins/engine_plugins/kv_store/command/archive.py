"""Records of namespaces in one file, to be carried elsewhere.

After 16 bytes (magic, format) follow entries: the namespace (32 bytes), the header of a record (64) and the record; the
last one says how many there were. No name and no path is in it: what is written where follows from digests. The last
used come first, so that what does not fit is what was used least.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.native.folder import unusable
from engine_plugins.kv_store.command.folder import FolderError
from engine_plugins.kv_store.record_files import (
    MOST_ABOUT,
    MOST_RECORD,
    UNFINISHED,
    About,
    about_of,
    file_of,
    id_of,
    problem_of,
    read_about,
    read_whole,
    record_files,
    write_about,
    write_file,
)
from engine_plugins.kv_store.record_header import FORMAT, HEADER, MAGIC

FIRST = struct.Struct("<4sH10x")
ARCHIVE, DESCRIBED, END = b"EKVA", b"EKVN", b"EKVE"
SPACE = 32
"""Bytes of a namespace."""
FOLDER_BYTES = 4096
"""That a new folder counts for, and the end of a file at most."""
MOST_DESCRIBED = 4096
"""Namespaces whose descriptions are kept."""


def export(root: Path, names: Sequence[str], target: Path) -> tuple[int, int]:
    """Write the records of namespaces to a new file. Returns how many there were, and how many were left out because
    they are damaged. Raises :class:`FolderError` and ``OSError``."""
    if target.exists():
        raise FolderError(f"{target} exists; name another file")
    found = sorted((-status.st_mtime, file) for name in names for file, status in record_files(root, name))
    new, counts = target.with_name(f".{target.name}.{secrets.token_hex(4)}"), Counter[bool]()
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
            stream.write(FIRST.pack(ARCHIVE, FORMAT))
            for name in names:
                _put(stream, name, DESCRIBED, _encoded(read_about(root / name)))
            for _, file in found:
                if file.name.startswith(UNFINISHED):
                    continue
                with suppress(FileNotFoundError):
                    counts[_put_record(stream, file)] += 1
            stream.write(bytes(SPACE) + HEADER.pack(END, FORMAT, 0, 0, counts[True], b"", bytes(SPACE)))
        os.rename(new, target)
    finally:
        new.unlink(missing_ok=True)
    return counts[True], counts[False]


def _put_record(stream: BinaryIO, file: Path) -> bool:
    try:
        whole = read_whole(file, id_of(file.name))
    except ValueError:
        return False
    stream.write(bytes.fromhex(file.parts[-3]) + whole)
    return True


def _put(stream: BinaryIO, name: str, kind: bytes, data: bytes) -> None:
    stream.write(bytes.fromhex(name) + HEADER.pack(kind, FORMAT, 0, 0, len(data), b"", bytes(SPACE)) + data)


def _encoded(about: About) -> bytes:
    return msgspec.json.encode(about)[:MOST_ABOUT]


@dataclass(slots=True)
class Taken:
    """What became of the entries of an archive."""

    added: int = 0
    there: int = 0
    """Were there already."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason."""
    no_room: int = 0
    problem: str = ""
    """Why reading ended before the end."""


def take(root: Path, source: Path, most_bytes: int) -> Taken:
    """Take the records of an archive into a folder, until ``most_bytes`` are in it: nothing makes way for them. Raises
    :class:`FolderError` and ``OSError``."""
    if reason := unusable(root):
        raise FolderError(f"{reason}; choose another with --path")
    taken = Taken()
    into = _Folder(root, most_bytes)
    with source.open("rb") as stream:
        try:
            for name, header, data in _entries(stream):
                kind = header[:4]
                if kind == DESCRIBED:
                    into.describe(name, about_of(data))
                elif problem := problem_of(header + data):
                    taken.refused[problem] += 1
                elif into.has(name, header):
                    taken.there += 1
                elif into.add(name, header, memoryview(data)):
                    taken.added += 1
                else:
                    taken.no_room += 1
        except _Broken as error:
            taken.problem = str(error)
    return taken


class _Broken(ValueError):
    """What follows cannot be read."""


def _entries(stream: BinaryIO) -> Iterator[tuple[str, bytes, bytes]]:
    """Namespace, header and data of each. Raises :class:`_Broken`."""
    first = stream.read(FIRST.size)
    if len(first) < FIRST.size or FIRST.unpack(first) != (ARCHIVE, FORMAT):
        raise _Broken(f"it is no archive of format {FORMAT}")
    while True:
        at = stream.tell() if stream.seekable() else 0
        before = stream.read(SPACE + HEADER.size)
        if len(before) < SPACE + HEADER.size:
            raise _Broken(f"it ends at byte {at}, before its last entry")
        space, header = before[:SPACE], before[SPACE:]
        kind, _, _, _, length, _, _ = HEADER.unpack(header)
        if kind == END:
            return
        if kind not in (MAGIC, DESCRIBED):
            raise _Broken(f"there is no entry at byte {at}")
        if length > (MOST_ABOUT if kind == DESCRIBED else MOST_RECORD):
            raise _Broken(f"the entry at byte {at} has {length} bytes, more than any record")
        data = stream.read(length)
        if len(data) < length:
            raise _Broken(f"it ends within the entry at byte {at}")
        yield space.hex(), header, data


class _Folder:
    """Where records are taken into."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root, self._most_bytes = root, most_bytes
        self._taken = sum(status.st_blocks * 512 for _, status in record_files(root))
        self._token, self._number = secrets.token_hex(8), 0
        self._at_s = time.time()
        self._described: dict[str, About] = {}

    def describe(self, name: str, about: About) -> None:
        if len(self._described) < MOST_DESCRIBED:
            self._described[name] = about

    def has(self, name: str, header: bytes) -> bool:
        return os.path.lexists(self._file(name, header))

    def add(self, name: str, header: bytes, record: memoryview) -> bool:
        """``False``: there is no room."""
        if self._taken + 3 * FOLDER_BYTES + HEADER.size + len(record) > self._most_bytes:
            return False
        file = self._file(name, header)
        for folder in (self._root / name, file.parent):
            self._make(folder)
        new = self._new(name)
        try:
            write_file(new, header, record)
            self._taken += new.stat().st_blocks * 512
            used_s = self._at_s - 1e-3 * self._number  # the last used come first
            os.utime(new, (used_s, used_s))
            os.replace(new, file)
        finally:
            new.unlink(missing_ok=True)
        return True

    def _make(self, folder: Path) -> None:
        if folder.is_symlink():
            raise FolderError(f"{folder} is a link, expected a folder")
        if folder.is_dir():
            return
        folder.mkdir(mode=0o700)
        self._taken += FOLDER_BYTES
        if folder.parent == self._root and folder.name in self._described:
            write_about(folder, self._described[folder.name], self._new(folder.name))

    def _file(self, name: str, header: bytes) -> Path:
        _, _, group, _, _, _, key = HEADER.unpack(header)
        return file_of(self._root / name, (group, key))

    def _new(self, name: str) -> Path:
        self._number += 1
        return self._root / name / f"{UNFINISHED}{self._token}-{self._number}"
