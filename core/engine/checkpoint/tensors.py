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

Cut = tuple[int, tuple[tuple[int, int], ...]]
"""An axis of a tensor, and ranges of its entries, the end not included."""

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

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """One tensor as stored, in memory of its own. ``cut``: an axis, and what to read along it; the rest of the file
        is not read. Raises :class:`CheckpointError` if the file got shorter."""
        entry = self._entries[name]
        if cut is None or not entry.shape:
            cut = 0, ((0, entry.shape[0] if entry.shape else 1),)
        axis, ranges = cut
        shape = entry.shape and (*entry.shape[:axis], sum(b - a for a, b in ranges), *entry.shape[axis + 1 :])
        item = entry.dtype.itemsize * prod(entry.shape[axis + 1 :])
        row, times = item * (entry.shape[axis] if entry.shape else 1), prod(entry.shape[:axis])
        wanted = [(i * row + a * item, (b - a) * item) for i in range(times) for a, b in ranges if b > a]
        if not prod(shape):
            return torch.empty(shape, dtype=entry.dtype)
        buffer = bytearray(entry.dtype.itemsize * prod(shape))
        into, at = memoryview(buffer), 0
        with open_file(entry.file) as file:
            for start, size in wanted:
                file.seek(entry.offset + start)
                if file.readinto(into[at : at + size]) != size:
                    raise CheckpointError(f"{entry.file}: ended inside tensor {name!r}")
                at += size
        return torch.frombuffer(buffer, dtype=entry.dtype).view(shape)


def open_checkpoint(path: str) -> Checkpoint:
    """Read and check every header of a model directory. Raises :class:`CheckpointError` naming what is wrong."""
    return Checkpoint({name: _entry(header) for name, header in headers.read_headers(path).items()})


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises :class:`CheckpointError` unless the header is sound."""
    return {name: _entry(header) for name, header in headers.read_header(file).items()}


def _entry(header: TensorHeader) -> TensorEntry:
    return TensorEntry(header.file, _DTYPES[header.dtype], header.shape, header.offset, header.num_bytes)
