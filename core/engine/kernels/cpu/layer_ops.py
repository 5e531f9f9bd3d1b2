"""What lies between a model's linear layers, as C++ kernels: ``execution=compile`` on a CPU. All take tensors or the
values of a program (:mod:`engine.kernels.cpu.program`).

As torch calls these ops are some thirty per layer. Each is tiny at one token, but its code and torch's dispatcher have
been pushed out of the cache by the weights that were streamed in between, so they took a quarter of a decode step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import LayerCache
from engine.kernels.cpu.program import empty, run
from engine.kernels.torch.norms import Norm
from engine.native import FLOAT, INT32, INT64, POINTER, Function, NativeCall

SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
"""Suffix of the functions for each element type."""


class Heads(ctypes.Structure):
    """``Heads`` of ``layer_ops.cpp``: the shape of a q, k and v projection, and what is done to its heads."""

    _fields_ = (
        ("num_heads", INT64),
        ("num_kv_heads", INT64),
        ("head_dim", INT64),
        ("rotary_half", INT64),
        ("q_norm", POINTER),
        ("k_norm", POINTER),
        ("q_eps", FLOAT),
        ("k_eps", FLOAT),
    )


class _RowNorm(ctypes.Structure):
    """``RowNorm`` of ``layer_ops.cpp``."""

    _fields_ = (("weight", POINTER), ("size", INT64), ("eps", FLOAT))


_FUNCTIONS = {
    "rms_norm": (POINTER, INT64, POINTER, INT64, POINTER),
    "rotate_and_write": (POINTER, INT64, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER),
    "gated_activation": (INT64, INT64, POINTER, INT32, POINTER),
}


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    functions = {f"{name}_{suffix}": types for name, types in _FUNCTIONS.items() for suffix in SUFFIXES.values()}
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


def _kernel(name: str, dtype: torch.dtype) -> Function:
    function: Function = getattr(kernels(), f"{name}_{SUFFIXES[dtype]}")
    return function


def compiled_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
    """RMSNorm over the last axis of ``[rows, size]`` in ``dtype``. ``weight``: float32 ``[size]``."""
    kernel, size = _kernel("rms_norm", dtype), weight.shape[0]
    shape = _RowNorm(weight.data_ptr(), size, eps)

    def call(x: Tensor, y: Tensor) -> NativeCall:
        assert x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()
        return kernel.at(ctypes.addressof(shape), x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr())

    def norm(x: Tensor) -> Tensor:
        y = empty(x, "normed", (x.shape[0], size))
        run(call, x, y)
        return y

    return norm


def compiled_gate(act: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """``act(gate) * up`` of contiguous ``[rows, 2 * size]``, gates first -> ``[rows, size]``."""
    kernel, code = _kernel("gated_activation", dtype), native.ACTIVATIONS[act]

    def call(gate_up: Tensor, y: Tensor) -> NativeCall:
        assert gate_up.is_contiguous()
        return kernel.at(*y.shape, gate_up.data_ptr(), code, y.data_ptr())

    def gate(gate_up: Tensor) -> Tensor:
        y = empty(gate_up, "gated", (gate_up.shape[0], gate_up.shape[1] // 2))
        run(call, gate_up, y)
        return y

    return gate


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head. ``weight``: float32 ``[head_dim]``."""

    weight: Tensor
    eps: float


class RotateAndWrite:
    """Norm and rotation of q and k inside the output of their projection, then k and v into the cache."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
        dtype: torch.dtype,
    ) -> None:
        self._kernel = _kernel("rotate_and_write", dtype)
        self._held = (q_norm, k_norm)  # their memory is pointed at
        q_weight, k_weight = (native.pointer(norm.weight if norm else None) for norm in self._held)
        q_eps, k_eps = (norm.eps if norm else 0.0 for norm in self._held)
        self._heads = Heads(num_heads, num_kv_heads, head_dim, rotary_dim // 2, q_weight, k_weight, q_eps, k_eps)

    def __call__(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, slots: Tensor, cache: LayerCache | None
    ) -> None:
        """``qkv``: contiguous ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, changed in place; ``rotation``:
        float32 cosines and sines ``[tokens, 1, rotary_dim / 2]``; ``slots``: int64 ``[tokens]``; ``cache``: one that
        stores the dtype of ``qkv`` as it is, or ``None`` to write nothing."""
        keys_and_values = (None, None) if cache is None else (cache.k, cache.v)
        run(self._call, qkv, *(rotation or (None, None)), slots, *keys_and_values)

    def _call(self, qkv: Tensor, *others: Tensor | None) -> NativeCall:
        assert qkv.is_contiguous()
        pointers = (native.pointer(other) for other in others)
        return self._kernel.at(ctypes.addressof(self._heads), qkv.shape[0], qkv.data_ptr(), *pointers)
