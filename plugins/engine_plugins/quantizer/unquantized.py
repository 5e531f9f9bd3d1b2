"""Weights in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import UNQUANTIZED, PackedLinear, StoredTensor, TileLoader
from engine.kernels.cpu.linear import float_linear
from engine.kernels.cpu.linear.onednn import (
    MANY_ROWS,
    can_prepack,
    prepack,
    prepacked_add,
    prepacked_linear,
    unpacked_reference,
)
from engine.kernels.triton.device import runs_triton
from engine_plugins.quantizer.config import UnquantizedConfig


class Unquantized:
    """See :class:`engine.contracts.quantizer.Quantizer`."""

    lossless = True

    def __init__(self, config: UnquantizedConfig, context: BuildContext) -> None:
        self._in_panels = float_linear.wanted(context)
        if self._in_panels:
            float_linear.kernels(getattr(torch, context.dtype))  # compiled here, so that a failure names this plugin

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return UNQUANTIZED

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        if self._in_panels and float_linear.can_pack(spec, dtype):
            bias = joined_bias(parts)
            bias = None if bias is None else bias.to(dtype)
            return float_linear.pack_float(spec, joined_weight(parts).to(dtype), bias)
        return pack_plain(spec, parts, dtype, device)

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        if self._in_panels and float_linear.can_pack(spec, dtype):
            return float_linear.packed_bytes(spec, dtype)
        return plain_bytes(spec, dtype, device, tied)


def plain_bytes(spec: LinearSpec, dtype: torch.dtype, device: str, tied: bool) -> int:
    """Bytes that :func:`pack_plain` adds to memory: none for a tied weight that stays as it is."""
    shared = tied and not (torch.device(device).type == "cpu" and can_prepack(dtype))
    weight = 0 if shared else spec.out_features * spec.in_features
    bias = spec.out_features if any(part.bias for part in spec.parts) else 0
    return (weight + bias) * dtype.itemsize


def pack_plain(
    spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, device: str
) -> PackedLinear:
    """Weights of all parts in one matrix, in the fastest layout torch has for this device."""
    weight, bias = joined_weight(parts).to(device=device, dtype=dtype), joined_bias(parts)
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if runs_triton(device):
        return _tiled(weight, bias)
    if torch.device(device).type == "cpu" and can_prepack(dtype):
        return _prepacked(weight, bias, 1 if spec.kind == "head" else MANY_ROWS)
    tensors = {"weight": weight} | _named("bias", bias)
    plain = _plain_linear(weight, bias)
    return PackedLinear(tensors, plain, plain, weight.shape[0], label=f"{_short(dtype)} F.linear")


def _prepacked(weight: Tensor, bias: Tensor | None, rows: int) -> PackedLinear:
    packed = prepack(weight, rows)
    return PackedLinear(
        {"weight": packed} | _named("bias", bias),
        reference=unpacked_reference(packed, bias),
        apply=prepacked_linear(packed, bias),
        out_features=weight.shape[0],
        apply_add=prepacked_add(packed, bias),
        label=f"{_short(weight.dtype)} oneDNN prepacked",
    )


def _tiled(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """As the checkpoint has it: fused kernels read it in tiles, torch's matrix multiplication serves many rows."""
    from engine.kernels.triton.weights import load_plain  # Triton, where it runs only

    weight = weight.contiguous()
    plain = _plain_linear(weight, bias)
    return PackedLinear(
        {"weight": weight} | _named("bias", bias),
        reference=plain,
        apply=plain,
        out_features=weight.shape[0],
        # addmm_ has no place for a bias beside the residual.
        apply_add=(lambda x, residual: residual.addmm_(x, weight.T)) if bias is None else None,
        tile_loader=TileLoader(load_plain, weight, bias=bias),
        label=f"{_short(weight.dtype)} F.linear",
    )


def _named(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    return {} if tensor is None else {name: tensor}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
