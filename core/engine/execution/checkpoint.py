"""Checkpoints on disk: safetensors files, one or many, checked before a byte of them is used.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header that gives
each tensor's dtype, shape and byte range, then the data without holes. Nothing in it can run code, which is why
pickled checkpoints are refused instead of read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER = 100 * 1024 * 1024
"""Bytes; the limit of the format's own implementation."""

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message names the file or the tensors and what was expected."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``num_bytes`` bytes from ``offset`` (from the start of the file)."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Checkpoint:
    """The tensors of a model directory by name. Opening it reads headers only."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def num_bytes_as(self, dtype: str) -> int:
        """Bytes of all tensors when those of 16 and 32 bit floats are held as ``dtype``."""
        item = getattr(torch, dtype).itemsize
        return sum(
            prod(entry.shape) * item if entry.dtype.is_floating_point and entry.dtype.itemsize > 1 else entry.num_bytes
            for entry in self._entries.values()
        )

    def entry(self, name: str) -> TensorEntry:
        return self._entries[name]

    def read(self, name: str) -> Tensor:
        """One tensor as stored, in memory of its own. Raises :class:`CheckpointError` if the file got shorter."""
        entry = self._entries[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        buffer = bytearray(entry.num_bytes)
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            if file.readinto(buffer) != entry.num_bytes:
                raise CheckpointError(f"{entry.file}: ended inside tensor {name!r}")
        return torch.frombuffer(buffer, dtype=entry.dtype).view(entry.shape)


def open_checkpoint(path: str) -> Checkpoint:
    """Read and check every header of a model directory.

    Raises :class:`CheckpointError` naming what is wrong: no safetensors, a damaged header, an index that points
    outside the directory, tensors that are missing or stored twice.
    """
    folder = Path(path)
    if (folder / INDEX_NAME).is_file():
        return _open_sharded(folder)
    if (folder / SINGLE_NAME).is_file():
        return Checkpoint(read_header(folder / SINGLE_NAME))
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"model.path={path}: {', '.join(pickled[:3])} is a pickled checkpoint; loading one can run any code it "
            "contains, so only safetensors are read. Convert it with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"model.path={path}: found neither {SINGLE_NAME} nor {INDEX_NAME}")


def _open_sharded(folder: Path) -> Checkpoint:
    index = folder / INDEX_NAME
    document = _parse_json(index.read_bytes(), index)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    entries: dict[str, TensorEntry] = {}
    duplicates: list[str] = []
    for file_name in sorted(set(weight_map.values())):
        _check_file_name(file_name, index)
        header = read_header(folder / file_name)
        duplicates += [name for name in header if name in entries]
        entries.update(header)
    if duplicates:
        raise CheckpointError(f"{index}: stored in more than one file: {name_list(duplicates)}")
    missing = [n for n, f in weight_map.items() if n not in entries or entries[n].file.name != f]
    if missing:
        raise CheckpointError(f"{index}: not in the file the index names: {name_list(missing)}")
    return Checkpoint(entries)


def _check_file_name(name: str, index: Path) -> None:
    """A shard is a file beside its index: a downloaded index must not make us read anything else."""
    if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a .safetensors file in this directory")
    if not (index.parent / name).is_file():
        raise CheckpointError(f"{index}: file {name!r} is missing")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises :class:`CheckpointError` unless the header is sound."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{file}: header of {length} bytes in a file of {size} bytes")
        document = _parse_json(stream.read(length), file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: header is not an object")
    data_start = 8 + length
    entries = {
        name: _parse_entry(file, name, value, data_start) for name, value in document.items() if name != "__metadata__"
    }
    _check_ranges(file, entries, data_start, size)
    return entries


def _parse_json(data: bytes, file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(f"{file}: {key!r} appears twice")
            seen[key] = value
        return seen

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error


def _parse_entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    where = f"{file}: tensor {name!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {value['dtype']!r}, expected one of {', '.join(_DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_counts(shape):
        raise CheckpointError(f"{where}: shape {shape!r}, expected non-negative integers")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r}, expected [begin, end]")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: {num_bytes} bytes for shape {shape} of {value['dtype']}")
    return TensorEntry(file, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_ranges(file: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Byte ranges follow one another without overlap or hole and end with the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            kind = "overlaps another" if entry.offset < end else "follows a hole"
            raise CheckpointError(f"{file}: tensor {name!r} {kind} at byte {entry.offset}")
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(f"{file}: tensors end at byte {end}, the file at {size}")


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
