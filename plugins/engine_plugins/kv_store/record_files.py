"""Records as files: what is in one, how it is named, and how it is checked.

``NAMESPACE/KK/KEY-GROUP`` in hexadecimal, with the first two digits of the key as ``KK``. A file is written beside its
place and renamed: it is whole or not there. It is not synced: what a power cut tears, the checksum shows.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.contracts.kv_store import RecordId
from engine_plugins.kv_store.record_header import FORMAT, HEADER, MAGIC, header_of

MOST_RECORD = 1 << 28
"""Bytes: no record is longer."""
UNFINISHED = "new-"
"""Beginning of the name of a file that is being written, before its store and a number."""
NAMESPACE = re.compile(r"[0-9a-f]{64}")
PLACE = re.compile(
    rf"{NAMESPACE.pattern}/(([0-9a-f]{{2}})/\2[0-9a-f]{{62}}-(0|[1-9][0-9]{{0,4}})|{UNFINISHED}[0-9a-f]{{16}}-[0-9]+)"
)
"""Of a store's files. Whatever else is in the folder is not theirs: it is neither counted nor removed."""
STAY = "user.engine.stay"
"""An attribute of a file. The file's time is that of its last use."""
MOST_STAY_S = 366 * 86400.0
STAYS = struct.Struct("<d32s")
"""How many seconds after that it is to stay, and whose it is."""
ABOUT = "namespace.json"
CLEARING = "clearing"
"""In a namespace whose records are being removed: while it is there, none of them may be found."""
MOST_ABOUT = 4096
"""Bytes of it."""


class About(msgspec.Struct, frozen=True):
    """What a namespace is of, for people: nothing depends on it."""

    model: str = ""
    dtype: str = ""
    device: str = ""
    block_size: int = 0
    record_bytes: tuple[int, ...] = ()
    """By KV group."""


def file_of(folder: Path, each: RecordId) -> Path:
    """``folder``: of the namespace."""
    group, key = each
    name = key.hex()
    return folder / name[:2] / f"{name}-{group}"


def id_of(name: str) -> RecordId:
    key, _, group = name.partition("-")
    return int(group), bytes.fromhex(key)


def write_file(file: Path, header: bytes, record: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as stream:
        stream.write(header)
        left = record
        while left:
            left = left[stream.write(left) :]


def read_file(file: Path, each: RecordId, buffer: memoryview) -> bool:
    """Whether all of it is there, as it was written for this id. It then counts as just used."""
    descriptor = _open(file)
    try:
        header = bytearray(HEADER.size)
        if os.preadv(descriptor, [header, buffer], 0) != HEADER.size + len(buffer):
            return False
        if bytes(header) != header_of(each, buffer):
            return False
        with suppress(OSError):  # where nothing can be written
            os.utime(descriptor)
    finally:
        os.close(descriptor)
    return True


def keep_file(file: Path, owner: bytes, seconds: float) -> None:
    """Say whose it is; ``seconds``: it was just used, and is to stay for so long after its last use. Where the file
    system has no attributes, later engines and others do not know."""
    with suppress(OSError):
        if seconds:
            os.utime(file, follow_symlinks=False)
        os.setxattr(file, STAY, STAYS.pack(seconds, owner), follow_symlinks=False)


def stay_of(file: Path) -> tuple[bytes, float]:
    """Whose it is (empty: not known), and for how many seconds after its last use it is to stay; 0: as any."""
    try:
        seconds, owner = STAYS.unpack(os.getxattr(file, STAY, follow_symlinks=False))
    except (OSError, struct.error):
        return b"", 0.0
    return owner, seconds if 0.0 <= seconds < MOST_STAY_S else 0.0


def read_whole(file: Path, each: RecordId) -> bytes:
    """Header and record of a file of any length. Raises ``ValueError`` for one that is not as it was written."""
    descriptor = _open(file)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > HEADER.size + MOST_RECORD:
            raise ValueError(f"it has {status.st_size} bytes, more than any record, or is no regular file")
        whole = stream.read(HEADER.size + MOST_RECORD)
    if problem := problem_of(whole, each):
        raise ValueError(problem)
    return whole


def problem_of(whole: bytes, each: RecordId | None = None) -> str:
    """What is wrong with a header and its record; empty: nothing. ``each``: the id that they should have."""
    if len(whole) < HEADER.size:
        return f"it has {len(whole)} bytes, fewer than a header"
    magic, form, group, _, length, _, key = HEADER.unpack_from(whole)
    if magic != MAGIC:
        return "it does not begin as a record"
    if form != FORMAT:
        return f"it is of format {form}, expected {FORMAT}"
    if length != len(whole) - HEADER.size:
        return f"it has {len(whole) - HEADER.size} bytes, its header says {length}"
    if whole[: HEADER.size] != header_of((group, key), memoryview(whole)[HEADER.size :]):
        return "its checksum is another"
    if each is not None and each != (group, key):
        return "it is the record of another block"
    return ""


def _open(file: Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def record_files(root: Path, namespace: str = "") -> Iterator[tuple[Path, os.stat_result]]:
    """All files of stores below, or those of one namespace."""
    for above, folders, names in os.walk(root):
        if above == str(root):
            folders[:] = [name for name in folders if NAMESPACE.fullmatch(name) and name.startswith(namespace)]
        for file in [Path(above, name) for name in names]:
            if PLACE.fullmatch(file.relative_to(root).as_posix()):
                with suppress(OSError):
                    status = os.stat(file, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield file, status


def write_about(folder: Path, about: About, new: Path) -> None:
    """Unless it is there. ``new``: where it is written first. Raises ``OSError``."""
    if not (folder / ABOUT).exists():
        write_file(new, b"", memoryview(msgspec.json.encode(about)[:MOST_ABOUT]))
        os.replace(new, folder / ABOUT)


def read_about(folder: Path) -> About:
    """As far as it is known. What can be printed of it is."""
    try:
        with open(_open(folder / ABOUT), "rb") as stream:
            return about_of(stream.read(MOST_ABOUT + 1))
    except OSError:
        return About()


def about_of(data: bytes) -> About:
    """Of anything that should be one."""
    try:
        found = msgspec.json.decode(data, type=About)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return About()
    model, dtype, device = (_printable(word) for word in (found.model, found.dtype, found.device))
    return About(model, dtype, device, found.block_size, found.record_bytes)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]
