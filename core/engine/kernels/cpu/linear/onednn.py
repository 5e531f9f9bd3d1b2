"""Linear layers on a CPU through oneDNN, with weights reordered once into the layout its kernels read."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MANY_ROWS = 512
"""Row count the layout of most weights is chosen for. At one row it is within some 15 % of a layout chosen for one row,
which in turn is several times slower at 512 rows."""


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix kernels for this dtype on this CPU (else it would emulate them slowly)."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def prepack(weight: Tensor, rows: int = MANY_ROWS) -> Tensor:
    """``[out, in]`` -> an opaque tensor for the functions below, laid out for inputs of about ``rows`` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def prepacked_linear(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """``x [M, in] -> [M, out]`` in the dtype of ``x``."""
    kernel = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        y: Tensor = kernel(x, packed, bias, "none", [], "")
        return y

    return linear


def prepacked_add(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """``x [M, in], residual [M, out] -> residual + linear(x)``, rounded once."""
    kernel = torch.ops.mkldnn._linear_pointwise.binary

    def linear_add(x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = kernel(x, residual, packed, bias, "add")
        return y

    return linear_add


def unpacked_reference(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Plain ``F.linear`` on the weight taken back out of its layout; keeps no second copy."""
    return lambda x: F.linear(x, packed.to_dense(), bias)
