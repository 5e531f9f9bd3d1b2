"""Weights in the form that kernels read, kept on disk from one start to the next.

A folder per model and way of rounding, in it a safetensors file per layer, whose metadata say what it was made of and
the CRC-32 of everything else in it. A file that is not exactly what is asked for is not used. Nothing here fails a
start: what cannot be kept is made again, and a warning says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError, read_header
from engine.native.folder import open_own, unusable
from engine.native.scratch import replacing, sweep

OURS = re.compile(r".+-[0-9a-f]{16}")
"""Names of folders that may be removed."""
SUFFIX = ".safetensors"
SPARE = 1 << 30
"""Bytes that are left free on the disk."""
KEEP_S = 30 * 24 * 3600
GIB = 1 << 30
_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensors of a layer, and numbers that say how to read them."""

    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]


class DiskCache:
    """One model's folder below ``root``. ``limit``: bytes of all folders there; the longest unused are removed."""

    def __init__(self, root: Path, folder: str, limit: int) -> None:
        assert OURS.fullmatch(folder)
        self._root, self._folder, self._limit = root, root / folder, limit
        self.why_not: str | None = None
        """Why nothing (more) is written; ``None``: it is."""
        reason = unusable(root)
        if reason is None and self._folder.is_dir():
            reason = unusable(self._folder)
        self._is_ours = reason is None
        if reason is None:
            sweep(self._folder)
        else:
            self._give_up(f"{reason}; or set quantizer.cache to another folder")
        self._is_used = False
        self._others: list[_Folder] | None = None

    def read(self, name: str, key: str) -> Kept | None:
        """What was written under ``name``, if it was made of ``key``."""
        file = self._file(name)
        try:
            kept = _read(file, key) if self._is_ours else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, CheckpointError) as error:
            warnings.warn(f"kept weights cannot be used and are made again: {file}: {error}", stacklevel=2)
            return None
        if kept is not None and not self._is_used:
            self._touch()
        return kept

    def write(self, name: str, key: str, kept: Kept) -> bool:
        """Whether it is kept. ``name``: the layer's; what it had before is replaced, whole or not at all."""
        if self.why_not is not None:
            return False
        try:
            self._make_room(sum(tensor.nbytes for tensor in kept.tensors.values()), self._file(name))
            if self.why_not is None:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                _write(self._file(name), key, kept)
        except OSError as error:
            self._give_up(str(error))
        return self.why_not is None

    def _file(self, name: str) -> Path:
        readable = re.sub(r"[^\w.-]", "_", name.partition("\n")[0])[-80:].lstrip(".")
        return self._folder / f"{readable}-{digest(name)}{SUFFIX}"

    def _touch(self) -> None:
        self._is_used = True
        try:
            os.utime(self._folder)
        except OSError:  # removed by another process
            return

    def _make_room(self, num_bytes: int, target: Path) -> None:
        """For ``num_bytes`` in place of ``target``, or give up."""
        if self._others is None:
            self._others = sorted(_folders(self._root, but=self._folder), key=lambda one: one.used)
        own = sum(status.st_size for path, status in _files(self._folder) if path != target)
        fits = own + num_bytes <= self._limit  # if not: nothing is gained by removing others'
        while fits and self._others:
            oldest = self._others[0]
            needed = own + num_bytes + sum(one.num_bytes for one in self._others)
            if needed <= self._limit and time.time() - oldest.used < KEEP_S:
                break
            _remove(self._others.pop(0).path)
        if not fits:
            self._give_up(
                f"quantizer.cache_gib={self._limit / GIB:g} is less than this model's weights take; set it higher, or "
                "quantizer.cache=none"
            )
        elif shutil.disk_usage(self._root).free < num_bytes + SPARE:
            self._give_up(f"less than {SPARE / GIB:g} GiB would be left free on the disk of {self._root}")

    def _give_up(self, reason: str) -> None:
        self.why_not = reason
        warnings.warn(f"weights are rounded anew at every start: {reason}", stacklevel=3)


def digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    used: float
    """When it was last written to or read, seconds since the epoch."""
    num_bytes: int


def _folders(root: Path, but: Path) -> Iterator[_Folder]:
    for path in root.iterdir():
        if path != but and OURS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                yield _Folder(path, path.stat().st_mtime, sum(status.st_size for _, status in _files(path)))
            except OSError:  # another process was faster
                continue


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Ours in ``folder``."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        try:
            if path.suffix == SUFFIX:
                yield path, path.stat()
        except OSError:
            continue


def _remove(folder: Path) -> None:
    if unusable(folder) is None:
        sweep(folder)
    for path, _ in _files(folder):
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:  # with something in it that is not ours
        return


def _write(target: Path, key: str, kept: Kept) -> None:
    # Not synchronized with the disk: what a power failure leaves half written is found out by its CRC.
    tensors = {name: tensor.cpu().contiguous() for name, tensor in kept.tensors.items()}
    sizes = json.dumps(dict(kept.sizes))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    crc = _crc(sizes, header)
    for tensor in tensors.values():
        crc = zlib.crc32(_bytes(tensor), crc)
    metadata = {"made_of": key, "crc32": str(crc), "sizes": sizes}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    with replacing(target) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def _read(file: Path, key: str) -> Kept | None:
    """``None`` if it was made of something else. Raises ``ValueError`` for a damaged file, ``OSError``."""
    with open_own(file) as stream:
        entries = read_header(file)  # of another one, if it was replaced just now: then the CRC differs
        stream.seek(8)
        header = json.loads(stream.read(min(entry.offset for entry in entries.values()) - 8))
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or metadata.keys() != {"made_of", "crc32", "sizes"}:
            raise ValueError("its metadata are not what an engine writes")
        if metadata["made_of"] != key:
            return None
        tensors, crc = {}, _crc(str(metadata["sizes"]), header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            stream.seek(entry.offset)
            tensor = torch.empty(entry.shape, dtype=entry.dtype)  # kernels like it aligned, as a mapped file is not
            if stream.readinto(_bytes(tensor)) != entry.num_bytes:
                raise ValueError(f"ended inside tensor {name!r}")
            crc = zlib.crc32(_bytes(tensor), crc)
            tensors[name] = tensor
    if str(crc) != metadata["crc32"]:
        raise ValueError(f"CRC-32 {crc}, expected {metadata['crc32']}")
    return Kept(tensors, json.loads(metadata["sizes"]))


def _crc(sizes: str, header: Mapping[str, object]) -> int:
    """Of what says how the tensors are to be read; ``header``: their entries, in the order of the file."""
    return zlib.crc32(json.dumps([sizes, header]).encode())


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; valid for as long as the tensor is."""
    count = math.prod(tensor.shape) * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")
