"""A checkpoint's tensors, read from safetensors files whose headers were checked (:mod:`engine.checkpoint.headers`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint import headers
from engine.checkpoint.files import CheckpointError, open_file
from engine.checkpoint.headers import TensorHeader, name_list

__all__ = ["Checkpoint", "CheckpointError", "TensorEntry", "name_list", "open_checkpoint", "read_header"]

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

    def num_bytes_as(self, dtype: str, ignored: tuple[str, ...] = ()) -> int:
        """Bytes of all tensors when those of 16 and 32 bit floats are held as ``dtype``; ``ignored``: how names begin
        that do not count."""
        item = getattr(torch, dtype).itemsize
        return sum(
            prod(entry.shape) * item if entry.dtype.is_floating_point and entry.dtype.itemsize > 1 else entry.num_bytes
            for name, entry in self._entries.items()
            if not name.startswith(ignored)
        )

    def entry(self, name: str) -> TensorEntry:
        return self._entries[name]

    def read(self, name: str) -> Tensor:
        """One tensor as stored, in memory of its own. Raises :class:`CheckpointError` if the file got shorter."""
        entry = self._entries[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        buffer = bytearray(entry.num_bytes)
        with open_file(entry.file) as file:
            file.seek(entry.offset)
            if file.readinto(buffer) != entry.num_bytes:
                raise CheckpointError(f"{entry.file}: ended inside tensor {name!r}")
        return torch.frombuffer(buffer, dtype=entry.dtype).view(entry.shape)


def open_checkpoint(path: str) -> Checkpoint:
    """Read and check every header of a model directory. Raises :class:`CheckpointError` naming what is wrong."""
    return Checkpoint({name: _entry(header) for name, header in headers.read_headers(path).items()})


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises :class:`CheckpointError` unless the header is sound."""
    return {name: _entry(header) for name, header in headers.read_header(file).items()}


def _entry(header: TensorHeader) -> TensorEntry:
    return TensorEntry(header.file, _DTYPES[header.dtype], header.shape, header.offset, header.num_bytes)
