"""The plugin: hands a step and a layer to ``attention.cpp`` in one call, or to torch where that cannot compute it.

FlashAttention (arXiv 2205.14135) with the softmax in float32: scores of a few hundred keys exist at a time, keys and
values are read once for all heads that share them, and the keys of long rows are split between threads
(Flash-Decoding). In bfloat16 the products run on AMX tiles where the processor has them, else on vectors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.native import FLOAT, INT32, INT64, POINTER, Function, NativeCall
from engine_plugins.attention_kernel.cpu.sources import ELEMENTS, attention_source
from engine_plugins.attention_kernel.torch_paged import TorchAttention

COMPUTED = {getattr(torch, name): element for name, element in ELEMENTS.items()}
"""What is computed with: the names of types in ``attention.cpp``."""
SCALED = {torch.int8: "int8_t", torch.float8_e4m3fn: "float8"}
"""Of keys and values that are stored otherwise than they are computed with, and have scales."""


class _Step(ctypes.Structure):
    """``Step`` of ``call.h``."""

    _fields_ = (
        ("q_starts", POINTER),
        ("kv_lens", POINTER),
        ("block_tables", POINTER),
        ("key_ends", POINTER),
        ("num_rows", INT64),
        ("table_stride", INT64),
        ("block_size", INT64),
    )


class _Op(ctypes.Structure):
    """``Op`` of ``call.h``."""

    _fields_ = (
        ("num_heads", INT64),
        ("num_kv_heads", INT64),
        ("head_dim", INT64),
        ("window", INT64),
        ("chunk", INT64),
        ("scale", FLOAT),
        ("soft_cap", FLOAT),
        ("sinks", POINTER),
        ("out_dim", INT64),
    )


class _Scales(ctypes.Structure):
    """``Scales`` of ``call.h``."""

    _fields_ = (("keys", POINTER), ("values", POINTER), ("per_token", INT32))


UNSCALED = _Scales(None, None, 0)


ARGUMENTS = (POINTER, POINTER, POINTER, POINTER, INT64, POINTER, POINTER, POINTER, INT32, POINTER)


@cache
def kernels(computed: torch.dtype, stored: torch.dtype) -> Any:
    """The functions for queries and cached elements of these types. Raises :class:`engine.native.NativeError`."""
    functions = {"attention": ARGUMENTS, "count_splits": (POINTER, POINTER, POINTER)}
    source = attention_source(COMPUTED[computed], (COMPUTED | SCALED)[stored])
    return native.load(source.file, functions, source.macros)


@dataclass(slots=True)
class Prepared:
    """A step's rows as the kernel reads them, and as torch does if a layer needs it."""

    batch: AttentionBatch
    step: _Step
    """Points at tensors of ``batch``."""
    for_torch: Any = None
    """What :meth:`TorchAttention.prepare` made of ``batch``, once a layer was left to it."""


class CpuAttention:
    """See :class:`engine.contracts.attention_kernel.AttentionKernel`.

    float32 and bfloat16, stored as they are or in 8 bits (int8, float8_e4m3fn) with scales; anything else (float16,
    other storage) is computed by :class:`TorchAttention`.
    """

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        max_verify_width=1 << 30,
        capturable=False,
        sinks=True,
        latent=True,
        chunk=True,
    )

    def __init__(self, config: SlotConfig, context: BuildContext, *, use_amx: bool = True) -> None:
        """``use_amx=False``: vectors only. Raises :class:`engine.native.NativeError` where nothing can be built."""
        dtype = getattr(torch, context.dtype)
        self.use_amx = dtype in COMPUTED and bool(kernels(dtype, dtype).can_use_amx()) and use_amx
        self._ops: dict[tuple[Attention, int | None], _Op] = {}
        self._known_scales: dict[tuple[int, int, bool], _Scales] = {}
        self._torch = TorchAttention(config, context)

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        computed = getattr(torch, dtype)
        stored = getattr(torch, kv_format.storage_dtype(dtype))
        reason = self._why_torch(op, computed, stored, kv_format)
        if reason is not None:
            return f"{self._torch.label(op, dtype, kv_format)} for {reason}"
        instructions = "AMX-BF16" if self.use_amx and computed == torch.bfloat16 else "vectors"
        scaled = "" if kv_format.scale == "none" else f", {str(stored).removeprefix('torch.')} keys and values"
        return f"CpuAttention, {instructions}{scaled}"

    def prepare(self, batch: AttentionBatch) -> Prepared:
        tables, lengths, key_ends = batch.block_tables, (batch.q_starts, batch.kv_lens_device), batch.key_ends
        assert key_ends is not None or all(q <= kv for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)), (
            "new tokens are keys, too"
        )
        assert tables.dtype == torch.int32 and tables.stride(1) == 1, "block tables are rows of int32"
        vectors = lengths if key_ends is None else (*lengths, key_ends)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in vectors), "lengths are vectors of int32"
        pointers = (*(tensor.data_ptr() for tensor in (*lengths, tables)), native.pointer(key_ends))
        return Prepared(batch, _Step(*pointers, len(batch.q_lens), tables.stride(0), batch.block_size))

    def forward(
        self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        """See the contract. ``q`` may be a view: each token's heads contiguous, tokens any stride apart."""
        if q.stride(2) != 1 or q.stride(1) != op.head_dim:
            q = q.contiguous()
        out = q.new_empty(q.shape[0], op.num_heads * op.out_dim)
        call = self.call(prepared, op, q, cache, out, sinks)
        if call is None:
            return self._torch.forward(self._for_torch(prepared), op, q, cache, sinks)
        call()
        return out

    def forward_lse(self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """See :class:`engine.contracts.attention_kernel.LogSumExpAttention`; ``q`` as for :meth:`forward`."""
        if q.stride(2) != 1 or q.stride(1) != op.head_dim:
            q = q.contiguous()
        out = q.new_empty(q.shape[0], op.num_heads * op.out_dim)
        lse = torch.full((q.shape[0], op.num_heads), float("-inf"))
        call = self._call(prepared, op, q, cache, out, None, lse)
        if call is None:
            return self._torch.forward_lse(self._for_torch(prepared), op, q, cache)
        call()
        return out, lse

    def call(
        self,
        prepared: Prepared,
        op: Attention,
        q: Tensor,
        cache: LayerCache,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> NativeCall | None:
        """See :class:`engine.contracts.attention_kernel.NativeAttention`."""
        return self._call(prepared, op, q, cache, out, sinks)

    def _call(
        self,
        prepared: Prepared,
        op: Attention,
        q: Tensor,
        cache: LayerCache,
        out: Tensor,
        sinks: Tensor | None,
        lse: Tensor | None = None,
    ) -> NativeCall | None:
        if self._why_torch(op, q.dtype, cache.k.dtype, cache.format) is not None:
            return None
        assert q.stride(2) == 1 and q.stride(1) == op.head_dim
        function: Function = kernels(q.dtype, cache.k.dtype).attention
        return function.at(
            ctypes.addressof(prepared.step), ctypes.addressof(self._op(op, sinks)),
            ctypes.addressof(self._scales(cache)), q.data_ptr(), q.stride(0), cache.k.data_ptr(), cache.v.data_ptr(),
            out.data_ptr(), self.use_amx, native.pointer(lse),
        )  # fmt: skip

    def most_splits(self, prepared: Prepared, op: Attention) -> int:
        """Into how many parts the keys of some of the step's queries are split between threads, at most."""
        most = ctypes.c_int64()
        kernels(torch.float32, torch.float32).count_splits(
            ctypes.byref(prepared.step), ctypes.byref(self._op(op)), ctypes.byref(most)
        )
        return most.value

    def _why_torch(self, op: Attention, dtype: torch.dtype, stored: torch.dtype, kv_format: KVFormat) -> str | None:
        """What there is no kernel for; ``None``: there is one."""
        if dtype not in COMPUTED:
            return str(dtype).removeprefix("torch.")
        if stored not in (dtype, *SCALED) or (stored != dtype) != (kv_format.scale != "none"):
            scaled = "" if kv_format.scale == "none" else " with scales"
            return f"keys and values in {str(stored).removeprefix('torch.')}{scaled}"
        if op.value_dim is not None and stored != dtype:
            return f"latent attention to {str(stored).removeprefix('torch.')}"
        # Masked keys get a large negative score before scores are scaled: it must stay one.
        return None if op.scale > 0 else f"scale={op.scale}"

    def _op(self, op: Attention, sinks: Tensor | None = None) -> _Op:
        key = op, native.pointer(sinks)
        known = self._ops.get(key)
        if known is None:
            assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
            window, chunk, soft_cap = op.window or 0, op.chunk or 0, op.soft_cap or 0.0
            heads = op.num_heads, op.num_kv_heads, op.head_dim
            known = _Op(*heads, window, chunk, op.scale, soft_cap, key[1], op.out_dim)
            self._ops[key] = known
        return known

    def _scales(self, cache: LayerCache) -> _Scales:
        if cache.k_scale is None or cache.v_scale is None:
            return UNSCALED
        key = cache.k_scale.data_ptr(), cache.v_scale.data_ptr(), cache.k_scale.dim() > 1
        return self._known_scales.setdefault(key, _Scales(*key))

    def _for_torch(self, prepared: Prepared) -> Any:
        if prepared.for_torch is None:
            prepared.for_torch = self._torch.prepare(prepared.batch)
        return prepared.for_torch
