"""What else lies between the layers and is written into programs: rows looked up, joined, widened and copied,
and where the tokens of a step and of chains go. Of tensors torch computes the same, on any device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.kernels.cpu.program import Value, empty, run
from engine.native import INT64, POINTER, NativeCall


class Metadata(ctypes.Structure):
    """``Metadata`` of ``row_ops.cpp``."""

    _fields_ = (
        *((name, POINTER) for name in ("positions", "slots", "q_starts", "kv_lens", "blocks")),
        *((name, INT64) for name in ("stride", "most", "groups")),
    )


class Chains(ctypes.Structure):
    """``Chains`` of ``row_ops.cpp``."""

    _fields_ = (
        ("tables", POINTER),
        ("group_stride", INT64),
        ("table_stride", INT64),
        ("block_size", INT64),
        ("to", Metadata),
        *((name, POINTER) for name in ("table_rows", "lengths", "tokens", "drafts")),
        ("most", INT64),
        ("rows", INT64),
        ("made", INT64),
    )


_FUNCTIONS = {
    "widen_bfloat16": (INT64, POINTER, POINTER),
    "copy_rows": (INT64, INT64, POINTER, INT64, POINTER, INT64),
    "gather_rows": (POINTER, INT64, INT64, POINTER, INT64, POINTER),
    "gather_own_rows": (POINTER, INT64, INT64, INT64, POINTER, INT64, POINTER),
    "fill_metadata": (POINTER, INT64, INT64, INT64, POINTER, POINTER, POINTER, POINTER, POINTER, INT64, INT64),
    "place_chains": (POINTER,),
    "grow_chains": (POINTER, POINTER, INT64),
}


@cache
def kernels() -> Any:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    return native.load(Path(__file__).with_suffix(".cpp"), _FUNCTIONS)


def lookup(table: Tensor, index: Tensor, name: str = "found") -> Tensor:
    """``table[index]``. ``index``: int64 ``[count]``; one of a value may be outside of the table, and finds a row of
    which every byte is 0xFF. ``name``: of the result in a program."""
    if not isinstance(index, Value):
        return table.index_select(0, index)
    rows = empty(index, name, (index.shape[0], *table.shape[1:]), table.dtype)
    run(gathered, table, index, rows)
    return rows


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding that is the rows of a table as they are: tokens int64 ``[T]`` -> ``[T, size]``."""

    rows: Tensor
    """``[entries, size]``"""

    def __call__(self, tokens: Tensor) -> Tensor:
        return lookup(self.rows, tokens, name="embedded")


@dataclass(frozen=True, slots=True)
class StepTable:
    """The same as the call of a step."""

    table: Table

    def __call__(self, context: object, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def lookup_own(table: Tensor, start: int, index: Tensor, name: str = "found") -> Tensor:
    """Of a table of which ``table`` is the rows from ``start`` on: other rows are 0. ``index``: int64 ``[count]``;
    ``name``: of the result in a program."""
    if isinstance(index, Value):
        rows = empty(index, name, (index.shape[0], *table.shape[1:]), table.dtype)
        run(lambda table, index, rows: _own_rows(table, start, index, rows), table, index, rows)
        return rows
    at = index - start
    here = (at >= 0) & (at < table.shape[0])
    return table.index_select(0, torch.where(here, at, 0)) * here[:, None]


def cat(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts, dim=-1)`` of matrices of one dtype."""
    value = next((part for part in parts if isinstance(part, Value)), None)
    if value is None:
        return torch.cat(tuple(parts), dim=-1)
    together = empty(value, "joined", (value.shape[0], sum(part.shape[1] for part in parts)))
    start = 0
    for part in parts:
        run(_copied, part, together[:, start : start + part.shape[1]])
        start += part.shape[1]
    return together


def widen(x: Tensor) -> Tensor:
    """``x.float()`` of contiguous float32 or bfloat16."""
    if not isinstance(x, Value):
        return x.float()
    if x.dtype == torch.float32:
        return x
    wide = empty(x, "widened", x.shape, torch.float32)
    run(lambda x, y: kernels().widen_bfloat16.at(x.numel(), x.data_ptr(), y.data_ptr()), x, wide)
    return wide


def cloned(x: Tensor) -> Tensor:
    """``x.clone()`` of a contiguous tensor: hidden states that a layer is about to change."""
    if not isinstance(x, Value):
        return x.clone()
    copy = empty(x, "copy", x.shape)
    run(_copied, x, copy)
    return copy


def copy(source: Any, target: Any) -> None:
    """``target.copy_(source)`` of values with rows of one shape, which may be the same."""
    if source.memory.data_ptr() != target.memory.data_ptr():
        run(_copied, source, target)


def gathered(table: Tensor, index: Tensor, out: Tensor) -> NativeCall:
    """``out[i] = table[index[i]]`` of contiguous tensors."""
    assert table.is_contiguous() and index.is_contiguous() and out.is_contiguous() and index.dtype == torch.int64
    row_bytes, count = table.stride(0) * table.element_size(), index.shape[0]
    call: NativeCall = kernels().gather_rows.at(
        table.data_ptr(), table.shape[0], row_bytes, index.data_ptr(), count, out.data_ptr()
    )
    return call


def _own_rows(table: Tensor, start: int, index: Tensor, out: Tensor) -> NativeCall:
    assert table.is_contiguous() and index.is_contiguous() and out.is_contiguous() and index.dtype == torch.int64
    row_bytes, count = table.stride(0) * table.element_size(), index.shape[0]
    call: NativeCall = kernels().gather_own_rows.at(
        table.data_ptr(), start, table.shape[0], row_bytes, index.data_ptr(), count, out.data_ptr()
    )
    return call


def _copied(source: Tensor, target: Tensor) -> NativeCall:
    """Of vectors, or of matrices with contiguous rows."""
    assert source.shape == target.shape and source.dtype == target.dtype and source.stride(-1) == target.stride(-1) == 1
    size, rows = source.element_size(), source.shape[0] if source.dim() > 1 else 1
    strides = [tensor.stride(0) * size if tensor.dim() > 1 else 0 for tensor in (source, target)]
    row_bytes = source.shape[-1] * size
    pointers = source.data_ptr(), target.data_ptr()
    call: NativeCall = kernels().copy_rows.at(rows, row_bytes, pointers[0], strides[0], pointers[1], strides[1])
    return call


def in_place_of(old: Tensor, new: Tensor) -> Tensor:
    """``new`` as a value where ``old`` is, whose memory outlives what ``new`` was computed in; a tensor as it is."""
    if not isinstance(new, Value):
        return new
    copy(new, old)
    return old
