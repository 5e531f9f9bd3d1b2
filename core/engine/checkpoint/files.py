"""Reading a file that may be anything: a pipe that never ends, a device, a gigabyte, JSON nested a million deep."""

from __future__ import annotations

import io
import json
import os
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from engine.checkpoint.limits import MAX_CONFIG_BYTES, MAX_DEPTH, MAX_VALUES

QUOTED_CHARS = 200
"""Most characters of a checkpoint that a message repeats."""
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_EXACT_DIGITS = 18
"""Integers of so many digits fit into 64 bits."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = QUOTED_CHARS
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 8, 8


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message names the file or the tensors and what was expected."""


def clipped(value: Any) -> str:
    """``value`` as a message repeats it: on one line, escaped and cut off."""
    text = _SHORT.repr(value)
    return text if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]}..."


def shown(value: Any) -> str:
    """A name as it is, if that is short and harmless; else :func:`clipped`."""
    return value if isinstance(value, str) and len(value) <= QUOTED_CHARS and value.isprintable() else clipped(value)


def one_line(text: str) -> str:
    """The beginning of what a library says of a checkpoint, which may repeat anything in it."""
    first = text.strip().partition("\n")[0][:QUOTED_CHARS]
    return first if first.isprintable() else repr(first)


def open_file(file: Path) -> io.BufferedReader:
    """A regular file of a checkpoint, open for reading. Raises :class:`CheckpointError` naming what it is instead.

    A link may lead anywhere within the model's folder, or within the repository that a snapshot of the Hugging Face
    cache belongs to (there, files are links to ``blobs``): a folder that was unpacked must not make us read others.
    """
    target, home = Path(os.path.realpath(file)), _home(file.parent.resolve())
    if not target.is_relative_to(home):
        raise CheckpointError(
            f"cannot read {shown(file.name)}: it links to {clipped(str(target))}, outside {clipped(str(home))}; put "
            "the file itself there"
        )
    try:
        # Opening a pipe without a writer would wait for one.
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot read {shown(file.name)}: {_kind(target) or error.strerror}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise CheckpointError(f"cannot read {shown(file.name)}: {_named(mode)}")
    return open(descriptor, "rb")


def read_file(file: Path, limit: int, limit_name: str) -> bytes:
    """All bytes of a file of a checkpoint, at most ``limit``. Raises :class:`CheckpointError`."""
    with open_file(file) as stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(limit + 1) if size <= limit else b""
        except OSError as error:
            raise CheckpointError(f"cannot read {shown(file.name)}: {error.strerror}") from error
    if max(size, len(data)) > limit:
        raise CheckpointError(
            f"cannot read {shown(file.name)}: {max(size, len(data))} bytes, at most {limit} are read ({limit_name})"
        )
    return data


def read_json(file: Path, limit: int = MAX_CONFIG_BYTES, limit_name: str = "MAX_CONFIG_BYTES") -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises :class:`CheckpointError` naming the file and what is wrong."""
    data = read_file(file, limit, limit_name)
    try:
        value = parse_json(data)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {shown(file.name)}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {shown(file.name)}: it is not a JSON object")
    return value


def parse_json(data: bytes, most_values: int = MAX_VALUES, limit_name: str = "MAX_VALUES") -> Any:
    """A JSON document in UTF-8, of limited size and depth, whose objects have each key once.

    Integers beyond 64 bits become floats, so that no reader meets one it cannot compute with. Raises
    :class:`CheckpointError` saying what is wrong.
    """
    check_values(data, most_values, limit_name)
    try:
        text = data.decode()
        if text.startswith("\ufeff"):
            raise CheckpointError("not valid JSON (it begins with a byte order mark; save it as UTF-8 without one)")
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not valid JSON (not UTF-8 at byte {error.start})") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if data.strip() else "the file is empty"
        raise CheckpointError(f"not valid JSON ({error.msg}: {where})") from error
    except RecursionError as error:
        raise CheckpointError(_too_deep()) from error
    _check_depth(value)
    if b"\\u" in data and not _is_unicode(value):
        raise CheckpointError("not valid JSON (half of a surrogate pair)")
    return value


def check_values(data: bytes, limit: int, limit_name: str) -> None:
    """Raises :class:`CheckpointError` for a JSON document of too many values, before it is parsed."""
    # Marks in strings count, too, which the limit has room for.
    count = sum(map(data.count, (b",", b"[", b"{")))
    if count > limit:
        raise CheckpointError(f"about {count} values, at most {limit} are read ({limit_name})")


def _home(folder: Path) -> Path:
    """Where the links of a model's folder may lead."""
    caches = (above.parent for above in (folder, *folder.parents) if above.name == "snapshots")
    return next((cache for cache in caches if (cache / "blobs").is_dir()), folder)


def _kind(file: Path) -> str:
    """What a file is that is no regular one; empty if it is one, or cannot be looked at."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else _named(mode)


def _named(mode: int) -> str:
    kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a special file")
    return f"it is {kind}, expected a regular file"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise CheckpointError(f"not valid JSON ({clipped(twice)} appears twice)")
    return found


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _EXACT_DIGITS else float(digits)


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    depth = -1
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise CheckpointError(_too_deep())
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for inside in parts for part in inside if type(part) in (dict, list)]


def _is_unicode(value: Any) -> bool:
    """Whether all text in a value has bytes: escapes can spell what has none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep() -> str:
    return f"nested too deep, at most {MAX_DEPTH} objects and lists within each other are read (MAX_DEPTH)"
