"""The file that a flag names for the result: tried before the work, written after it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_lab.shared.errors import EvalError


def check_writable(path: str, inputs: Sequence[str] = (), flag: str = "--json") -> None:
    """Raise :class:`EvalError` where the file that ``flag`` names could not be written, or would be written over one of
    ``inputs``. Leaves nothing behind."""
    file = Path(path)
    if any(file.exists() and Path(other).exists() and file.samefile(other) for other in inputs):
        raise EvalError(f"{flag} {path}: that is read, too; name another file")
    try:
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        if file.exists() and not file.is_file():  # a pipe or a terminal: opening it may already take effect
            return
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError("it may not be written")
        tempfile.NamedTemporaryFile(dir=file.resolve().parent, prefix=".engine-").close()
    except OSError as error:
        raise EvalError(f"{flag} {path}: expected a file that can be written ({error.strerror or error})") from error


def check_folder(path: str | Path, flag: str) -> None:
    """Raise :class:`EvalError` where the folder that ``flag`` names could not be made, or no file be written in it.
    Leaves nothing behind."""
    folder = Path(path).absolute()
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        tempfile.NamedTemporaryFile(dir=nearest, prefix=".engine-").close()
    except OSError as error:
        raise EvalError(
            f"{flag} {path}: expected a folder that can be written to ({error.strerror or error})"
        ) from error


def write_json(path: str, document: Any) -> None:
    """Write it whole or not at all. What is infinite or not a number becomes a text, as ``"inf"``, which JSON's numbers
    cannot say. Raises ``OSError``."""
    data = msgspec.json.format(msgspec.json.encode(_sayable(document)), indent=1)
    file = Path(path).resolve()
    if file.exists() and not file.is_file():
        file.write_bytes(data)
        return
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".engine-", delete=False) as whole:
        try:
            whole.write(data)
            whole.flush()
            os.chmod(whole.name, file.stat().st_mode & 0o777 if file.exists() else 0o666 & ~_umask())
            os.replace(whole.name, file)
        except BaseException:
            os.unlink(whole.name)
            raise


def _umask() -> int:
    """Of this process: it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _sayable(item) for key, item in value.items()}
    return [_sayable(item) for item in value] if isinstance(value, list | tuple) else value
