"""Attention kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_plugins.attention_kernel.torch_paged import TorchAttention


class Short(TorchAttention):
    """Returns 16 columns whatever the model has."""

    says = r"forward\(\) returned .*\[\d+, 16\] on cpu, expected contiguous float32 \[\d+, 64\]"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, op, q, cache)[:, :16]


class ColumnShort(TorchAttention):
    """Forgets the last column."""

    says = r"forward\(\) returned .*\[\d+, 63\]"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, op, q, cache)[:, :-1].contiguous()


class OtherDtype(TorchAttention):
    """Returns bfloat16 under float32."""

    says = r"forward\(\) returned bfloat16 \[\d+, 64\]"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, op, q, cache).bfloat16()


class HeadsApart(TorchAttention):
    """Returns heads and their elements on axes of their own."""

    says = r"forward\(\) returned float32 \[\d+, 4, 16\]"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, op, q, cache).view(q.shape)


class NoScale(TorchAttention):
    """Ignores the scale of the scores."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, replace(op, scale=1.0), q, cache)


class SwappedCache(TorchAttention):
    """Takes values for keys."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, op, q, replace(cache, k=cache.v, v=cache.k))


class FirstRowOnly(TorchAttention):
    """Computes the first row of a batch and leaves zeros elsewhere."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        found = super().forward(prepared, op, q, cache)
        found[1:] = 0
        return found


class FewRows(TorchAttention):
    """Computes the first four rows of a batch."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        found = super().forward(prepared, op, q, cache)
        found[sum(prepared.batch.q_lens[:4]) :] = 0
        return found


class ShortSighted(TorchAttention):
    """Sees the last 64 keys."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        return super().forward(prepared, replace(op, window=64), q, cache)


class FirstLayer(TorchAttention):
    """Attends to the first layer's keys in every layer."""

    says = r"forward\(\) is off by"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        self._cache = getattr(self, "_cache", cache)
        return super().forward(prepared, op, q, self._cache)


class ScalesTheCache(TorchAttention):
    """Scales keys where they are stored."""

    says = r"forward\(\) (changed the cache|is off by)"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        cache.k.mul_(op.scale)
        return super().forward(prepared, replace(op, scale=1.0), q, cache)


class PrepareRaises(TorchAttention):
    """``prepare`` raises at every call."""

    says = r"prepare\(\) raised KeyError: 'no plan' \(attention_kernels\.py:\d+\)"

    def prepare(self, batch: Any) -> Any:
        raise KeyError("no plan")


class ForwardExits(TorchAttention):
    """``forward`` ends the process."""

    says = r"forward\(\) raised SystemExit: 3"

    def forward(self, prepared: Any, op: Any, q: Any, cache: Any) -> Any:
        raise SystemExit(3)


class CapabilitiesInWords(TorchAttention):
    """``capabilities`` is a text."""

    says = r"capabilities is 'everything', expected AttentionCapabilities"
    capabilities: Any = "everything"


class HeadDimsNumber(TorchAttention):
    """``capabilities.head_dims`` is one number."""

    says = r"capabilities\.head_dims is 16, expected tuple\[int, \.\.\.\] or None"
    capabilities = replace(TorchAttention.capabilities, head_dims=16)  # type: ignore[arg-type]


class NativeElsewhere(TorchAttention):
    """Offers native calls, which write beside the output."""

    says = r"call\(\) writes outside of its output"

    def call(self, prepared: Any, op: Any, q: Any, cache: Any, out: Any) -> Any:
        import ctypes

        from engine.native import Function

        memset = Function("memset", ctypes.CDLL(None).memset, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64))
        return memset.at(out.data_ptr() - 64, 0, 64)
