"""Weights in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, StoredTensor
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.cpu_linear import can_prepack, prepack, prepacked_linear, unpacked_reference

STORED = (
    StoredTensor("weight", {"out": 0, "in": 1}),
    StoredTensor("bias", {"out": 0}, optional=True),
)


class Unquantized:
    """See :class:`engine.contracts.quantizer.Quantizer`."""

    lossless = True

    def __init__(self, config: UnquantizedConfig, context: BuildContext) -> None:
        pass

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return STORED

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        return pack_plain(parts, dtype, device)


def pack_plain(parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, device: str) -> PackedLinear:
    """Weights of all parts in one matrix, in the fastest layout this device has."""
    weight = joined_weight(parts).to(device=device, dtype=dtype)
    bias = joined_bias(parts)
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    if torch.device(device).type != "cpu" or not can_prepack(dtype):
        tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
        plain = _plain_linear(weight, bias)
        return PackedLinear(tensors, plain, plain, weight.shape[0], label=f"{name} F.linear")
    packed = prepack(weight)
    return PackedLinear(
        {"weight": packed} | ({} if bias is None else {"bias": bias}),
        reference=unpacked_reference(packed, bias),
        apply=prepacked_linear(packed, bias),
        out_features=weight.shape[0],
        label=f"{name} oneDNN prepacked",
    )


def _plain_linear(weight: Tensor, bias: Tensor | None) -> Any:
    return lambda x: F.linear(x, weight, bias)


def joined_weight(parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """``[sum(out), in]``; a single part is not copied, so a tied weight stays shared."""
    weights = [part["weight"] for part in parts]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def joined_bias(parts: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """``[sum(out)]``, zeros for parts without one; ``None`` if no part has one."""
    if not any("bias" in part for part in parts):
        return None
    return torch.cat(
        [part["bias"] if "bias" in part else part["weight"].new_zeros(part["weight"].shape[0]) for part in parts]
    )
