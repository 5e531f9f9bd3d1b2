"""A folder of records: its namespaces, which of its files are damaged, and what removing one takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.native.folder import user_folder
from engine_plugins.kv_store.command.words import EVERY
from engine_plugins.kv_store.record_files import (
    ABOUT,
    CLEARING,
    NAMESPACE,
    UNFINISHED,
    About,
    id_of,
    read_about,
    read_whole,
    record_files,
)


class FolderError(ValueError):
    """What was asked for cannot be done; the message says what would help."""


@dataclass(slots=True)
class Namespace:
    """What is kept of one model with its settings."""

    name: str
    about: About = field(default_factory=About)
    records: int = 0
    num_bytes: int = 0
    """On the disk, those of unfinished files as well."""
    unfinished: int = 0
    newest_s: float = -math.inf
    oldest_s: float = math.inf
    """When a record was used last, by the system's clock."""


def root_of(path: str) -> Path:
    """The folder that ``kv_store.disk.path`` means."""
    return user_folder("kv") if path == "auto" else Path(path).expanduser().absolute()


def existing(path: str) -> Path:
    """The same, which is there. Raises :class:`FolderError`."""
    root = root_of(path)
    if not root.is_dir():
        raise FolderError(f"--path {path}: there is no folder {root}; expected that of kv_store.disk.path")
    return root


def namespaces(root: Path) -> list[Namespace]:
    """By when they were used last, the last first."""
    found = {folder.name: Namespace(folder.name, read_about(folder)) for folder in _folders(root)}
    for file, status in record_files(root):
        one = found.get(file.relative_to(root).parts[0])
        if one is None:  # made since
            continue
        one.num_bytes += status.st_blocks * 512
        if file.name.startswith(UNFINISHED):
            one.unfinished += 1
            continue
        one.records += 1
        one.newest_s, one.oldest_s = max(one.newest_s, status.st_mtime), min(one.oldest_s, status.st_mtime)
    return sorted(found.values(), key=lambda one: (-one.newest_s, one.name))


def chosen(root: Path, asked: str) -> list[str]:
    """The namespaces that are meant, by name. Raises :class:`FolderError`."""
    names = sorted(folder.name for folder in _folders(root))
    if asked in ("", EVERY):
        return names
    meant = [name for name in names if name.startswith(asked)]
    if len(meant) != 1:
        said = f"{len(meant)} namespaces begin so" if meant else "no namespace begins so"
        there = ", ".join(name[:12] for name in names) or "none"
        raise FolderError(f"{asked}: {said}; {root} has {there} (or say {EVERY})")
    return meant


def damaged(root: Path, names: list[str]) -> Iterator[tuple[Path, str]]:
    """Files of records that are not as they were written, and what is wrong with each; others have an empty text."""
    for name in names:
        for file, _ in record_files(root, name):
            if file.name.startswith(UNFINISHED):
                continue
            try:
                read_whole(file, id_of(file.name))
                yield file, ""
            except FileNotFoundError:  # evicted since
                continue
            except (OSError, ValueError) as error:
                yield file, str(error)


@dataclass(slots=True)
class Left:
    """What is left of a namespace that was to be removed."""

    of_others: list[Path] = field(default_factory=list)
    """What no store has written."""
    failed: dict[Path, str] = field(default_factory=dict)
    """Records that cannot be removed, and why."""
    is_marked: bool = False
    """A store that opens the folder removes these, and finds none of them."""


def clear(root: Path, name: str) -> Left:
    """Remove all that stores have written of a namespace. Raises ``OSError`` where its records are gone and something
    beside them cannot be removed."""
    folder, left = root / name, Left()
    with suppress(OSError):
        (folder / CLEARING).touch(0o600)
    for file, _ in record_files(root, name):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            left.failed[file] = str(error.strerror)
    if left.failed:
        left.is_marked = (folder / CLEARING).exists()
        return left
    for own in (ABOUT, CLEARING):
        (folder / own).unlink(missing_ok=True)
    for below in [*folder.iterdir(), folder]:
        with suppress(OSError):
            below.rmdir()
    found = folder.rglob("*") if folder.exists() else ()
    left.of_others = sorted(below for below in found if below.is_symlink() or not below.is_dir())
    return left


def used_within(root: Path, seconds: Sequence[float]) -> list[int]:
    """Bytes of the records that were used in the last so many seconds each."""
    now = time.time()
    files = [status for file, status in record_files(root) if not file.name.startswith(UNFINISHED)]
    return [sum(status.st_blocks * 512 for status in files if now - status.st_mtime < each) for each in seconds]


def ago(at_s: float) -> str:
    """How long a moment of the system's clock is past."""
    seconds = max(0.0, time.time() - at_s)
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(num_bytes: float) -> str:
    """``1.2 GiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _folders(root: Path) -> Iterator[Path]:
    for folder in root.iterdir():
        if NAMESPACE.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            yield folder
