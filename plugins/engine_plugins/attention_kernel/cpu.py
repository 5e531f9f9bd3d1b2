"""Attention on a CPU in one compiled call per layer: ``cpu_attention.cpp``.

FlashAttention (arXiv 2205.14135) with the softmax in float32: scores of a few hundred keys exist at a time, keys and
values are read once for all heads that share them, and the keys of long rows are split between threads
(Flash-Decoding). In bfloat16 the products run on AMX tiles where the processor has them, else on vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities
from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.native import FLOAT, INT32, INT64, POINTER
from engine_plugins.attention_kernel.torch_paged import TorchAttention

FUNCTIONS = {torch.float32: "attention_float", torch.bfloat16: "attention_bfloat16"}
"""Element types and their functions."""


class _Step(ctypes.Structure):
    """``Step`` of ``cpu_attention.cpp``."""

    _fields_ = (
        ("q_lens", POINTER),
        ("kv_lens", POINTER),
        ("block_tables", POINTER),
        ("num_rows", INT64),
        ("table_stride", INT64),
        ("block_size", INT64),
    )


class _Op(ctypes.Structure):
    """``Op`` of ``cpu_attention.cpp``."""

    _fields_ = (
        ("num_heads", INT64),
        ("num_kv_heads", INT64),
        ("head_dim", INT64),
        ("window", INT64),
        ("scale", FLOAT),
        ("soft_cap", FLOAT),
    )


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    arguments = (POINTER, POINTER, POINTER, INT64, POINTER, POINTER, POINTER, INT32)
    return native.load(Path(__file__).with_name("cpu_attention.cpp"), dict.fromkeys(FUNCTIONS.values(), arguments))


@dataclass(slots=True)
class Staged:
    """A step's rows as the kernel reads them, and as torch does if a layer needs it."""

    batch: AttentionBatch
    step: _Step
    held: tuple[Any, ...]
    """What ``step`` points at."""
    fallback: Any = None


class CpuAttention:
    """See :class:`engine.contracts.attention_kernel.AttentionKernel`.

    float32 and bfloat16 stored as they are; anything else (float16, a KV format of its own) is computed by
    :class:`TorchAttention`.
    """

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        max_verify_width=1 << 30,
        recordable=False,
    )

    def __init__(self, config: SlotConfig, context: BuildContext, *, use_amx: bool = True) -> None:
        """``use_amx=False``: vectors only. Raises :class:`engine.native.NativeError` where nothing can be built."""
        library = kernels()
        self._functions: dict[torch.dtype, Callable[..., None]] = {
            dtype: getattr(library, name) for dtype, name in FUNCTIONS.items()
        }
        self.use_amx = use_amx and bool(library.can_use_amx())
        self._ops: dict[Attention, _Op] = {}
        self._torch = TorchAttention(config, context)

    def stage(self, batch: AttentionBatch) -> Staged:
        assert all(q <= kv for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)), "new tokens are keys, too"
        num_rows = len(batch.q_lens)
        lengths = (ctypes.c_int32 * num_rows)(*batch.q_lens), (ctypes.c_int32 * num_rows)(*batch.kv_lens)
        tables = batch.block_tables.to(torch.int32).contiguous()
        step = _Step(*map(ctypes.addressof, lengths), tables.data_ptr(), num_rows, tables.stride(0), batch.block_size)
        return Staged(batch, step, (*lengths, tables))

    def record(
        self,
        staged: Staged,
        op: Attention,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_format: KVFormat,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor:
        """See the contract. ``q`` may be a view: each token's heads contiguous, tokens any stride apart."""
        function = self._functions.get(q.dtype)
        if function is None or kv_format.scale != "none" or k_cache.dtype != q.dtype or op.scale <= 0:
            return self._by_torch(staged, op, q, k_cache, v_cache, kv_format, k_scale, v_scale)
        if q.stride(2) != 1 or q.stride(1) != op.head_dim:
            q = q.contiguous()
        out = q.new_empty(q.shape[0], op.num_heads * op.head_dim)
        function(
            ctypes.addressof(staged.step), ctypes.addressof(self._op(op)), q.data_ptr(), q.stride(0),
            k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), self.use_amx,
        )  # fmt: skip
        return out

    def _op(self, op: Attention) -> _Op:
        known = self._ops.get(op)
        if known is None:
            window, soft_cap = op.window or 0, op.soft_cap or 0.0
            known = _Op(op.num_heads, op.num_kv_heads, op.head_dim, window, op.scale, soft_cap)
            self._ops[op] = known
        return known

    def _by_torch(self, staged: Staged, *arguments: Any) -> Tensor:
        if staged.fallback is None:
            staged.fallback = self._torch.stage(staged.batch)
        return self._torch.record(staged.fallback, *arguments)
