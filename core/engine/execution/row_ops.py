"""What else is between the kernels of a recorded function, as C++: rows copied, looked up, widened and searched, and
where the tokens of a chain go."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine import native
from engine.native import INT64, POINTER


class Chains(ctypes.Structure):
    """``Chains`` of ``row_ops.cpp``."""

    _fields_ = (
        ("tables", POINTER),
        ("table_stride", INT64),
        ("block_size", INT64),
        ("rows", INT64),
        ("slots", POINTER),
        ("lengths", POINTER),
        ("positions", POINTER),
        ("slot_mapping", POINTER),
        ("blocks", POINTER),
        ("kv_lens", POINTER),
        ("drafts", POINTER),
        ("most", INT64),
        ("made", INT64),
    )


_FUNCTIONS = {
    "argmax_float": (INT64, INT64, POINTER, INT64, POINTER),
    "argmax_bfloat16": (INT64, INT64, POINTER, INT64, POINTER),
    "widen_bfloat16": (INT64, POINTER, POINTER),
    "copy_rows": (INT64, INT64, POINTER, INT64, POINTER, INT64),
    "copy_many": (INT64, POINTER, POINTER, POINTER),
    "gather_rows": (POINTER, INT64, INT64, POINTER, INT64, POINTER),
    "place_chains": (POINTER,),
    "grow_chains": (POINTER, POINTER, INT64),
}


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    return native.load(Path(__file__).with_suffix(".cpp"), _FUNCTIONS)


def gather(table: Tensor, index: Tensor, out: Tensor) -> None:
    """``out[i] = table[index[i]]`` along the first axis; contiguous, of one dtype. ``index``: int64 ``[count]``; where
    it is outside of the table, every byte of ``out`` is 0xFF."""
    row_bytes = table[0].nbytes if table.dim() > 1 else table.element_size()
    kernels().gather_rows(
        table.data_ptr(), table.shape[0], row_bytes, index.data_ptr(), index.shape[0], out.data_ptr()
    )


def join(parts: Sequence[Tensor], out: Tensor) -> None:
    """``torch.cat(parts, dim=-1)`` of matrices with contiguous rows."""
    at = 0
    for part in parts:
        size, width = part.element_size(), part.shape[1]
        kernels().copy_rows(
            part.shape[0], width * size, part.data_ptr(), part.stride(0) * size, out.data_ptr() + at * size,
            out.stride(0) * size,
        )  # fmt: skip
        at += width


def argmax(x: Tensor, out: Tensor) -> None:
    """``x.argmax(dim=-1)`` of a float32 or bfloat16 matrix; of a row with a NaN any place in it."""
    kernel = kernels().argmax_float if x.dtype == torch.float32 else kernels().argmax_bfloat16
    kernel(x.shape[0], x.shape[1], x.data_ptr(), x.stride(0), out.data_ptr())


def widen(x: Tensor, out: Tensor) -> None:
    """``x.float()`` of contiguous bfloat16."""
    kernels().widen_bfloat16(x.numel(), x.data_ptr(), out.data_ptr())


class Copies:
    """Copies tensors to where a recording reads them, all in one call."""

    def __init__(self, targets: Sequence[Tensor]) -> None:
        """``targets``: contiguous; they stay where they are."""
        assert all(target.is_contiguous() for target in targets)
        self._held = tuple(targets)
        count = len(self._held)
        self._to = (POINTER * count)(*(target.data_ptr() for target in targets))
        self._bytes = tuple(target.nbytes for target in targets)
        self._sizes = (INT64 * count)(*self._bytes)
        self._from = (POINTER * count)()
        arrays = (ctypes.addressof(array) for array in (self._from, self._to, self._sizes))
        self._arguments = (count, *arrays)
        self._copy = kernels().copy_many

    def __call__(self, sources: Sequence[Tensor]) -> None:
        """``sources``: of the targets' shapes and dtypes, in their order."""
        whole = [source if source.is_contiguous() else source.contiguous() for source in sources]
        for i, (source, size) in enumerate(zip(whole, self._bytes, strict=True)):
            assert source.nbytes == size, (source.shape, source.dtype, self._held[i].shape, self._held[i].dtype)
            self._from[i] = source.data_ptr()
        self._copy(*self._arguments)


def copy(source: Tensor, target: Tensor) -> None:
    """Between contiguous tensors of one shape and dtype."""
    assert source.is_contiguous() and target.is_contiguous() and source.nbytes == target.nbytes
    kernels().copy_rows(1, source.nbytes, source.data_ptr(), 0, target.data_ptr(), 0)


def place(chains: Chains) -> None:
    """Where the next token of each chain goes: positions, slots, block tables and lengths."""
    kernels().place_chains(ctypes.addressof(chains))


def grow(chains: Chains, tokens: Tensor, advance: bool) -> None:
    """Add a draft to each chain, int64 ``[rows]``. ``advance``: the keys of one token more are in the cache."""
    kernels().grow_chains(ctypes.addressof(chains), tokens.data_ptr(), int(advance))
