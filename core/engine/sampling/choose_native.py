"""Choosing tokens of drafts by C++: a call to write into programs of native calls."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

from engine import native
from engine.native import INT64, POINTER, NativeCall
from engine.sampling.sources import CHOOSE


class Columns(ctypes.Structure):
    """``Columns`` of ``choose.cpp``: addresses of :class:`engine.sampling.state.SamplingState`'s columns."""

    _fields_ = (("floats", POINTER), ("top_p", POINTER), ("ints", POINTER), ("rows", INT64))


_FUNCTIONS = {"choose_tokens": (POINTER, POINTER, POINTER, INT64, INT64, POINTER, INT64, POINTER, POINTER)}


@cache
def kernels() -> Any:
    """The compiled function. Raises :class:`engine.native.NativeError`."""
    return native.load(CHOOSE.file, _FUNCTIONS)


def chosen(
    columns: Columns, rows: Tensor, positions: Tensor, offset: int, logits: Tensor, ids: Tensor | None, out: Tensor
) -> NativeCall:
    """``out[i]`` is the token after position ``positions[i] + offset`` of row ``rows[i]`` of the device tables, as
    :func:`engine.sampling.choose.choose` chooses it from ``logits [count, V]``: greedily or with the request's noise.

    ``rows``, ``positions``, ``out``: int64 ``[count]``; ``logits``: float32; ``ids``: int64 ``[V]``, the token that
    each column stands for. All contiguous; ``columns`` must live as long as the call.
    """
    count, size = logits.shape
    assert logits.is_contiguous() and rows.is_contiguous() and positions.is_contiguous() and out.is_contiguous()
    call: NativeCall = kernels().choose_tokens.at(
        ctypes.addressof(columns), rows.data_ptr(), positions.data_ptr(), offset, count, logits.data_ptr(), size,
        native.pointer(ids), out.data_ptr(),
    )  # fmt: skip
    return call
