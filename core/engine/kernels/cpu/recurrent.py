"""A gated delta network's memory on a CPU, for any number of tokens: of tensors, or of the values of a program."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.ops import DeltaRule, ShortConv
from engine.kernels.context import StateCache
from engine.kernels.cpu.layer_ops import SUFFIXES
from engine.kernels.cpu.program import empty, run
from engine.native import INT64, POINTER, NativeCall


class _Convolution(ctypes.Structure):
    """``Convolution`` of ``recurrent.cpp``."""

    _fields_ = (
        *((name, POINTER) for name in ("taps", "kept")),
        *((name, INT64) for name in ("tap_stride", "kept_stride", "out_stride", "features", "kernel", "block_size")),
    )


class _Gates(ctypes.Structure):
    """``Gates`` of ``recurrent.cpp``."""

    _fields_ = (*((name, POINTER) for name in ("rate", "bias")), ("heads", INT64))


class _DeltaRule(ctypes.Structure):
    """``DeltaRule`` of ``recurrent.cpp``."""

    _fields_ = (
        *((name, POINTER) for name in ("kept", "states")),
        *((name, INT64) for name in ("key_heads", "key_dim", "heads", "value_dim", "block_size")),
    )


_ROWS = (INT64, POINTER, POINTER, POINTER, INT64)
_FUNCTIONS = {
    "short_conv": (POINTER, *_ROWS, POINTER, INT64, POINTER),
    "gates": (POINTER, INT64, POINTER, INT64, POINTER, INT64, POINTER),
    "delta_rule": (POINTER, *_ROWS, POINTER, POINTER, POINTER),
}


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    functions = {f"{name}_{suffix}": types for name, types in _FUNCTIONS.items() for suffix in SUFFIXES.values()}
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


class _OnCache(NamedTuple):
    """Structures that point at a cache."""

    convolutions: tuple[_Convolution, ...]
    """Of each input."""
    rule: _DeltaRule


class DeltaNetwork:
    """Convolutions of queries, keys and values, and the delta rule of them."""

    def __init__(
        self, conv: ShortConv, rule: DeltaRule, taps: Tensor, rate: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> None:
        """``taps``: ``[kernel, features]``, the oldest first; ``rate`` (logarithms) and ``bias``: ``[num_heads]``. All
        float32."""
        self._conv, self._rule = conv, rule
        negative = -rate.exp()
        self._held = (taps, negative, bias)  # pointed at
        self._gates = _Gates(negative.data_ptr(), bias.data_ptr(), rule.num_heads)
        self._dtype = dtype
        self._on_cache: dict[tuple[int, ...], _OnCache] = {}

    def __call__(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        write: Tensor,
        decay: Tensor,
        batch: AttentionBatch,
        inputs: StateCache,
        memory: StateCache,
    ) -> Tensor:
        """``parts``: queries, keys and values, ``[num_tokens, ...]``; ``inputs``: the cache of the convolution;
        ``memory``: that of the rule."""
        count, heads = write.shape[0], self._rule.num_heads
        structures = self._structures(inputs, memory, batch.block_size)
        qkv = empty(write, "convolved", (count, self._conv.features), torch.float32)
        start = 0
        for part, convolution in zip(parts, structures.convolutions, strict=True):
            of_part = qkv[:, start : start + convolution.features]
            start += convolution.features
            run(partial(self._convolved, convolution, batch), part, of_part)
        gates = empty(write, "gates", (count, 2 * heads), torch.float32)
        run(self._gated, write, decay, gates)
        y = empty(write, "remembered", (count, heads * self._rule.value_dim))
        run(partial(self._ruled, structures.rule, batch), qkv, gates, y)
        return y

    def _structures(self, inputs: StateCache, memory: StateCache, block_size: int) -> _OnCache:
        key = inputs.tokens.data_ptr(), memory.tokens.data_ptr(), memory.states.data_ptr(), block_size
        if key not in self._on_cache:
            rule, features, taps = self._rule, self._conv.features, self._held[0]
            keys, values = rule.num_key_heads * rule.key_dim, rule.num_heads * rule.value_dim
            convolutions = tuple(
                _Convolution(
                    taps[:, start:].data_ptr(), inputs.tokens[..., start:].data_ptr(), features,
                    inputs.tokens.shape[2], features, size, self._conv.kernel, block_size,
                )
                for start, size in ((0, keys), (keys, keys), (2 * keys, values))
            )  # fmt: skip
            shape = rule.num_key_heads, rule.key_dim, rule.num_heads, rule.value_dim, block_size
            pointers = memory.tokens.data_ptr(), memory.states.data_ptr()
            self._on_cache[key] = _OnCache(convolutions, _DeltaRule(*pointers, *shape))
        return self._on_cache[key]

    def _convolved(self, convolution: _Convolution, batch: AttentionBatch, x: Tensor, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and y.stride(0) == convolution.out_stride
        pointers = x.data_ptr(), x.stride(0), y.data_ptr()
        return self._function("short_conv").at(ctypes.addressof(convolution), *_rows(batch), *pointers)

    def _gated(self, write: Tensor, decay: Tensor, y: Tensor) -> NativeCall:
        assert write.stride(1) == decay.stride(1) == 1
        pointers = write.data_ptr(), write.stride(0), decay.data_ptr(), decay.stride(0), y.data_ptr()
        return self._function("gates").at(ctypes.addressof(self._gates), y.shape[0], *pointers)

    def _ruled(self, rule: _DeltaRule, batch: AttentionBatch, qkv: Tensor, gates: Tensor, y: Tensor) -> NativeCall:
        pointers = qkv.data_ptr(), gates.data_ptr(), y.data_ptr()
        return self._function("delta_rule").at(ctypes.addressof(rule), *_rows(batch), *pointers)

    def _function(self, name: str) -> native.Function:
        found: native.Function = getattr(kernels(), f"{name}_{SUFFIXES[self._dtype]}")
        return found


def _rows(batch: AttentionBatch) -> tuple[int, ...]:
    tables, lengths = batch.block_tables, (batch.q_starts, batch.kv_lens_device)
    assert tables.dtype == torch.int32 and tables.stride(1) == 1
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in lengths)
    return (len(batch.q_lens), *(each.data_ptr() for each in (*lengths, tables)), tables.stride(0))
