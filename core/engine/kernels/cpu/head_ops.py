"""Heads by themselves on a CPU: of tensors, or of the values of a program. Inputs are rows of contiguous elements,
results are contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine import native
from engine.contracts.ops import HeadLinear, HeadSlice
from engine.kernels.cpu.layer_ops import SUFFIXES
from engine.kernels.cpu.program import empty, run
from engine.native import INT64, POINTER, NativeCall


class _HeadCopy(ctypes.Structure):
    """``HeadCopy`` of ``head_ops.cpp``."""

    _fields_ = tuple((name, INT64) for name in ("heads", "size", "from_dim", "from_at", "to_dim", "to_at"))


class _HeadProduct(ctypes.Structure):
    """``HeadProduct`` of ``head_ops.cpp``."""

    _fields_ = (
        *((name, INT64) for name in ("heads", "chosen", "features", "next", "transposed")),
        ("weights", POINTER),
    )


_FUNCTIONS = {
    "copy_heads": (POINTER, INT64, POINTER, INT64, POINTER, INT64),
    "multiply_heads": (POINTER, INT64, POINTER, INT64, POINTER),
}


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    functions = {f"{name}_{suffix}": types for name, types in _FUNCTIONS.items() for suffix in SUFFIXES.values()}
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


def _function(name: str, dtype: torch.dtype) -> native.Function:
    found: native.Function = getattr(kernels(), f"{name}_{SUFFIXES[dtype]}")
    return found


def sliced_heads(op: HeadSlice, width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """``[rows, width]``: the dimensions of each head that ``op`` says."""
    heads, size = width // op.head_dim, op.stop - op.start
    copy = _copy(_HeadCopy(heads, size, op.head_dim, op.start, size, 0), dtype)

    def slice_heads(x: Tensor) -> Tensor:
        y = empty(x, "sliced", (x.shape[0], heads * size))
        run(copy, x, y)
        return y

    return slice_heads


def joined_heads(num_heads: int, widths: Sequence[int], dtype: torch.dtype) -> Callable[..., Tensor]:
    """Two of ``[rows, width]``: head by head, one after the other."""
    dims = [width // num_heads for width in widths]
    copies = [
        _copy(_HeadCopy(num_heads, dim, dim, 0, sum(dims), at), dtype)
        for dim, at in zip(dims, (0, dims[0]), strict=True)
    ]

    def join(*parts: Tensor) -> Tensor:
        y = empty(parts[0], "joined", (parts[0].shape[0], sum(widths)))
        for copy, part in zip(copies, parts, strict=True):
            run(copy, part, y)
        return y

    return join


def _copy(what: _HeadCopy, dtype: torch.dtype) -> Callable[[Tensor, Tensor], NativeCall]:
    function = _function("copy_heads", dtype)

    def call(x: Tensor, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and y.is_contiguous() and x.dtype == y.dtype
        rows = x.shape[0], x.data_ptr(), x.stride(0)
        return function.at(ctypes.addressof(what), *rows, y.data_ptr(), y.stride(0))

    return call


def multiplied_heads(op: HeadLinear, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """``weight``: ``[num_heads, rows, features]``, of which ``op`` reads some rows. For few tokens: weights are read
    once, and x is multiplied by vectors."""
    function, chosen = _function("multiply_heads", weight.dtype), weight[:, op.start : op.stop]
    assert weight.is_contiguous()
    what = _HeadProduct(*chosen.shape, weight.stride(0), op.transposed, chosen.data_ptr())
    made = op.num_heads * (op.features if op.transposed else op.stop - op.start)

    def call(x: Tensor, y: Tensor, held: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and x.dtype == held.dtype
        return function.at(ctypes.addressof(what), x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr())

    def multiply(x: Tensor) -> Tensor:
        y = empty(x, "multiplied", (x.shape[0], made))
        run(call, x, y, weight)
        return y

    return multiply
