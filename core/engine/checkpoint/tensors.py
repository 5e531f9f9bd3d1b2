"""A checkpoint's tensors, read from safetensors files whose headers were checked (:mod:`engine.checkpoint.headers`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint import headers
from engine.checkpoint.files import CheckpointError, open_file
from engine.checkpoint.headers import TensorHeader, name_list

__all__ = ["Checkpoint", "CheckpointError", "TensorEntry", "name_list", "open_checkpoint", "read_header"]

Ranges = tuple[tuple[int, int], ...]
Cut = tuple[int, Ranges]
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
    """The tensors of a model directory by name. Opening it reads headers only. ``lost``, ``note``: as
    :class:`~engine.checkpoint.headers.Headers` has them."""

    def __init__(self, entries: dict[str, TensorEntry], lost: frozenset[str] = frozenset(), note: str = "") -> None:
        self._entries = entries
        self.lost = lost
        self.note = note

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

    def read(self, name: str, cuts: Sequence[Cut] = ()) -> Tensor:
        """One tensor as stored, in memory of its own. ``cuts``: of different axes, what to read along each; the rest of
        the file is not read; a single number is read as it is. Raises :class:`CheckpointError` if the file got shorter,
        and for a tensor that has not what is to be read."""
        entry = self._entries[name]
        taken: list[Ranges] = [((0, size),) for size in entry.shape]
        for axis, ranges in cuts if entry.shape else ():
            if axis >= len(taken) or any(not 0 <= start <= stop <= entry.shape[axis] for start, stop in ranges):
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, and {list(ranges)} of axis {axis} "
                    "are to be read"
                )
            taken[axis] = tuple(ranges)
        shape = tuple(sum(stop - start for start, stop in ranges) for ranges in taken)
        if not prod(shape):
            return torch.empty(shape, dtype=entry.dtype)
        buffer = bytearray(entry.dtype.itemsize * prod(shape))
        into, at = memoryview(buffer), 0
        with open_file(entry.file) as file:
            for start, size in _stretches(entry, taken):
                file.seek(entry.offset + start)
                if file.readinto(into[at : at + size]) != size:
                    raise CheckpointError(f"{entry.file}: ended inside tensor {name!r}")
                at += size
        return torch.frombuffer(buffer, dtype=entry.dtype).view(shape)


def check_finite(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Read tensors, and raise :class:`CheckpointError` for the first that holds NaN or infinity. Costs as much as
    loading them: for who has seen that something is wrong."""
    for name in sorted(names):
        entry = checkpoint.entry(name)
        if not entry.dtype.is_floating_point:
            continue
        stored = checkpoint.read(name)
        numbers = stored.float() if entry.dtype.itemsize == 1 else stored
        wrong = int((~numbers.isfinite()).sum())
        if wrong:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} holds NaN or infinity ({wrong} of {numbers.numel()} numbers); expected "
                "finite numbers: fetch or convert the checkpoint anew"
            )


def _stretches(entry: TensorEntry, taken: Sequence[Ranges]) -> Iterator[tuple[int, int]]:
    """Where the bytes of some ranges of each axis are, in order: first ones, counted from the tensor's, and how
    many."""
    last = max((axis for axis, size in enumerate(entry.shape) if taken[axis] != ((0, size),)), default=None)
    if last is None:
        yield 0, entry.num_bytes
        return
    strides = [entry.dtype.itemsize * prod(entry.shape[axis + 1 :]) for axis in range(last + 1)]
    before = ([i for start, stop in ranges for i in range(start, stop)] for ranges in taken[:last])
    for indices in product(*before):
        begin = sum(i * stride for i, stride in zip(indices, strides, strict=False))
        for start, stop in taken[last]:
            if stop > start:
                yield begin + start * strides[last], (stop - start) * strides[last]


def open_checkpoint(path: str) -> Checkpoint:
    """Read and check every header of a model directory. Raises :class:`CheckpointError` naming what is wrong."""
    found = headers.read_headers(path)
    return Checkpoint({name: _entry(header) for name, header in found.tensors.items()}, found.lost, found.note)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises :class:`CheckpointError` unless the header is sound."""
    return {name: _entry(header) for name, header in headers.read_header(file).items()}


def _entry(header: TensorHeader) -> TensorEntry:
    return TensorEntry(header.file, _DTYPES[header.dtype], header.shape, header.offset, header.num_bytes)
