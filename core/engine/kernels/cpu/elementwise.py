"""Single ops on a CPU as C++ kernels: of tensors, or of the values of a program. Inputs are rows of contiguous
elements, results are contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import LayerCache
from engine.contracts.ops import Norm, PositionScale
from engine.kernels.cpu.layer_ops import SUFFIXES
from engine.kernels.cpu.program import empty, run
from engine.native import ACTIVATIONS, FLOAT, INT64, POINTER, NativeCall

KINDS = ("add", "gate", "gate_all", "gated", "activated", "scaled", "capped", "times")
"""As the numbers of ``Kind`` in ``elementwise.cpp``."""
ACTS = {**ACTIVATIONS, "gelu": 10, "relu": 11, "relu2": 12}
"""Codes of activations."""


class _HeadNorms(ctypes.Structure):
    """``HeadNorms`` of ``elementwise.cpp``."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "bias")),
        *((name, INT64) for name in ("heads", "size", "by_head", "centred")),
        ("eps", FLOAT),
    )


class _Rotation(ctypes.Structure):
    """``Rotation`` of ``elementwise.cpp``."""

    _fields_ = tuple((name, INT64) for name in ("heads", "head_dim", "half", "start", "interleaved"))


class _Elementwise(ctypes.Structure):
    """``Elementwise`` of ``elementwise.cpp``."""

    _fields_ = (*((name, INT64) for name in ("kind", "activation", "size")), ("factor", FLOAT))


class _PositionScale(ctypes.Structure):
    """``PositionScale`` of ``elementwise.cpp``."""

    _fields_ = (*((name, INT64) for name in ("size", "length", "offset")), ("beta", FLOAT))


_FUNCTIONS = {
    "norm_heads": (POINTER, INT64, POINTER, INT64, POINTER),
    "rotate_heads": (POINTER, INT64, POINTER, INT64, POINTER, POINTER, POINTER),
    "combine": (POINTER, INT64, POINTER, INT64, POINTER, INT64, POINTER),
    "scale_by_position": (POINTER, INT64, POINTER, INT64, POINTER, POINTER),
    "write_kv": (INT64, INT64, POINTER, INT64, POINTER, INT64, POINTER, POINTER, POINTER),
}


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    functions = {f"{name}_{suffix}": types for name, types in _FUNCTIONS.items() for suffix in SUFFIXES.values()}
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


def _function(name: str, dtype: torch.dtype) -> native.Function:
    found: native.Function = getattr(kernels(), f"{name}_{SUFFIXES[dtype]}")
    return found


def head_norms(
    op: Norm, width: int, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """``[rows, width]``, which is one or several heads of ``op.size``. ``weight``, ``bias``: float32."""
    function = _function("norm_heads", dtype)
    pointers = (weight.data_ptr(), native.pointer(bias))
    shape = _HeadNorms(*pointers, width // op.size, op.size, bool(op.by_head), op.kind == "layer", op.eps)

    def call(x: Tensor, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and weight.is_contiguous() and (bias is None or bias.is_contiguous())
        return function.at(ctypes.addressof(shape), x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr())

    def norm(x: Tensor) -> Tensor:
        y = empty(x, "normed", (x.shape[0], width))
        run(call, x, y)
        return y

    return norm


def rotated_heads(
    width: int, head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, start: int = 0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``(x [rows, width], cosines, sines)``, float32 ``[rows, 1, rotary_dim / 2]``. ``start``: of the rotated part of
    a head."""
    function = _function("rotate_heads", dtype)
    shape = _Rotation(width // head_dim, head_dim, rotary_dim // 2, start, interleaved)

    def call(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
        pointers = cos.data_ptr(), sin.data_ptr(), y.data_ptr()
        return function.at(ctypes.addressof(shape), x.shape[0], x.data_ptr(), x.stride(0), *pointers)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = empty(x, "rotated", (x.shape[0], width))
        run(call, x, cos, sin, y)
        return y

    return rotate


class Combine:
    """One of :data:`KINDS` of one or two values of ``size`` features, in their dtype: logits are float32 in any model.
    ``factor``: of ``scaled``, and the cap."""

    def __init__(self, kind: str, size: int, act: str | None = None, factor: float = 1.0) -> None:
        self._what = _Elementwise(KINDS.index(kind), 0 if act is None else ACTS[act], size, factor)
        self._size = size

    def __call__(self, a: Tensor, b: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """``[rows, size]``, in the contiguous memory ``y`` if that is given, which may be that of ``a``."""
        y = empty(a, "combined", (a.shape[0], self._size)) if y is None else y
        run(self._call, a, b, y)
        return y

    def _call(self, a: Tensor, b: Tensor | None, y: Tensor) -> NativeCall:
        assert a.stride(1) == 1 and y.is_contiguous() and y.dtype == a.dtype
        assert b is None or (b.stride(1) == 1 and b.dtype == a.dtype)
        strides = a.stride(0), 0 if b is None else b.stride(0)
        pointers = a.data_ptr(), native.pointer(b)
        what = ctypes.addressof(self._what)
        rows = pointers[0], strides[0], pointers[1], strides[1]
        return _function("combine", a.dtype).at(what, a.shape[0], *rows, y.data_ptr())


def scaled_by_position(width: int, op: PositionScale, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """``(x [rows, width], positions)``, int64 ``[rows]``."""
    function, what = _function("scale_by_position", dtype), _PositionScale(width, op.length, op.offset, op.beta)

    def call(x: Tensor, positions: Tensor, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and positions.is_contiguous() and positions.dtype == torch.int64
        rows = x.shape[0], x.data_ptr(), x.stride(0)
        return function.at(ctypes.addressof(what), *rows, positions.data_ptr(), y.data_ptr())

    def scale(x: Tensor, positions: Tensor) -> Tensor:
        y = empty(x, "scaled", (x.shape[0], width))
        run(call, x, positions, y)
        return y

    return scale


def write_kv(k: Tensor, v: Tensor | None, slots: Tensor, cache: LayerCache) -> None:
    """``k``, ``v``: ``[tokens, num_kv_heads * head_dim]`` in the dtype of the cache; ``slots``: int64 ``[tokens]``.
    Without ``v`` values are a part of keys."""
    run(_written, k, v, slots, cache.k, cache.v)


def _written(k: Tensor, v: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor) -> NativeCall:
    assert k.stride(1) == 1 and k.dtype == keys.dtype and slots.is_contiguous() and keys.is_contiguous()
    assert v is None or (v.stride(1) == 1 and v.dtype == k.dtype and values.is_contiguous())
    sizes = k.shape[0], k.shape[1]
    rows = k.data_ptr(), k.stride(0), native.pointer(v), 0 if v is None else v.stride(0)
    pointers = slots.data_ptr(), keys.data_ptr(), values.data_ptr()
    return _function("write_kv", k.dtype).at(*sizes, *rows, *pointers)
