"""KV formats."""

from __future__ import annotations

from typing import Any

import torch

from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat


class PerToken(NativeFormat):
    """``scale`` is a granularity that does not exist."""

    says = r"scale is 'per_token', expected 'none' or 'per_layer_head' or 'per_token_head'"
    scale: Any = "per_token"


class Float99(NativeFormat):
    """Stores in a dtype that torch does not have."""

    says = r"storage_dtype\(\) returned 'float99', expected the name of a torch dtype"

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float99"


class OtherDtype(NativeFormat):
    """Packs to another dtype than it says."""

    says = r"pack\(\) returned float64 .* expected contiguous float32"

    def pack(self, x: Any, scale: Any) -> Any:
        return x.double()


class HeadShort(NativeFormat):
    """Packs a head too few."""

    says = r"pack\(\) returned .*\[40, 1, 16\]"

    def pack(self, x: Any, scale: Any) -> Any:
        return x[:, :1].contiguous()


class NoClamp(Int8Format):
    """Lets large numbers wrap around."""

    says = r"unpack\(\) gave back numbers that are off by|pack\(\) made NaN"
    scale: Any = "none"

    def pack(self, x: Any, scale: Any) -> Any:
        return (x * 300.0).to(torch.int64).to(torch.int8)

    def unpack(self, x: Any, scale: Any, dtype: Any) -> Any:
        return x.to(dtype) / 300.0


class Overflows(NativeFormat):
    """Stores in float16 without a bound: large keys become infinite."""

    says = r"pack\(\) made NaN or infinity"
    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float16"

    def pack(self, x: Any, scale: Any) -> Any:
        return (x * 16.0).half()

    def unpack(self, x: Any, scale: Any, dtype: Any) -> Any:
        return x.to(dtype) / 16.0


class ClampsInPlace(Int8Format):
    """Changes the keys that it is given."""

    says = r"pack\(\) changed its input"

    def pack(self, x: Any, scale: Any) -> Any:
        return super().pack(x.clamp_(-0.5, 0.5), scale)


class NotLossless(NativeFormat):
    """Says that it is lossless, and rounds."""

    says = r"unpack\(\) gave back other numbers than were packed, although lossless is True"

    def pack(self, x: Any, scale: Any) -> Any:
        return x.bfloat16().to(x.dtype)


class Negates(NativeFormat):
    """Stores what it is to store as it is, negated."""

    says = r"pack\(\) changed what is stored as it is"

    def pack(self, x: Any, scale: Any) -> Any:
        return -x

    def unpack(self, x: Any, scale: Any, dtype: Any) -> Any:
        return -x.to(dtype)


class RunningScale(NativeFormat):
    """Divides by the largest key it has ever seen."""

    says = r"unpack\(\) gave back other numbers once others had been packed"
    largest = 0.0
    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float64"

    def pack(self, x: Any, scale: Any) -> Any:
        self.largest = max(self.largest, float(x.abs().max()))
        return x.double() / self.largest

    def unpack(self, x: Any, scale: Any, dtype: Any) -> Any:
        return (x * self.largest).to(dtype)


class UnpackRaises(NativeFormat):
    """``unpack`` raises."""

    says = r"unpack\(\) raised NotImplementedError"

    def unpack(self, x: Any, scale: Any, dtype: Any) -> Any:
        raise NotImplementedError
