"""Weights in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, StoredTensor
from engine_plugins.quantizer.bf16_linear import can_run, pack_bf16
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.cpu_linear import (
    FEW_ROWS,
    LARGE,
    MANY_ROWS,
    by_rows,
    can_prepack,
    prepack,
    prepacked_add,
    prepacked_linear,
    unpacked_reference,
)

STORED = (
    StoredTensor("weight", {"out": 0, "in": 1}),
    StoredTensor("bias", {"out": 0}, optional=True),
)


SPARE_MEMORY = 8
"""Weights may be kept in two layouts if they take at most one part in this many of a machine's memory."""


class Unquantized:
    """See :class:`engine.contracts.quantizer.Quantizer`."""

    lossless = True

    def __init__(self, config: UnquantizedConfig, context: BuildContext) -> None:
        itemsize = 4 if context.dtype == "float32" else 2
        self._features = context.device.features if context.execution == "compile" else frozenset()
        self._two_layouts = body_parameters(context.model) * itemsize * SPARE_MEMORY <= context.device.memory_bytes

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return STORED

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        if dtype == torch.bfloat16 and can_run(self._features, spec.in_features):
            return pack_bf16(spec, joined_weight(parts).to(dtype), joined_bias(parts))
        return pack_plain(spec, parts, dtype, device, self._two_layouts)


def body_parameters(model: ModelFacts) -> int:
    """Weights of all linear layers but the head, roughly (biases and norms left out)."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def pack_plain(
    spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, device: str, two_layouts: bool
) -> PackedLinear:
    """Weights of all parts in one matrix, in the fastest layout this device has. ``two_layouts``: memory may be spent
    on a second one."""
    weight, bias = joined_weight(parts).to(device=device, dtype=dtype), joined_bias(parts)
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if torch.device(device).type == "cpu" and can_prepack(dtype):
        return _prepacked(weight, bias, two_layouts, head=spec.kind == "head")
    tensors = {"weight": weight} | _named("bias", bias)
    plain = _plain_linear(weight, bias)
    return PackedLinear(tensors, plain, plain, spec.out_features, label=f"{_short(dtype)} F.linear")


def _prepacked(weight: Tensor, bias: Tensor | None, two_layouts: bool, head: bool) -> PackedLinear:
    # The head sees the few rows that sample, whatever the step: it needs no second layout.
    packed = prepack(weight, 1 if head else MANY_ROWS)
    tensors = {"weight": packed} | _named("bias", bias)
    label = f"{_short(weight.dtype)} oneDNN prepacked"
    apply, apply_add = prepacked_linear(packed, bias), prepacked_add(packed, bias)
    if two_layouts and not head and weight.numel() >= LARGE:
        single = prepack(weight, 1)
        tensors["single_row"] = single
        label += f" (up to {FEW_ROWS} rows from a second layout)"
        apply = by_rows(prepacked_linear(single, bias), apply)
    return PackedLinear(
        tensors,
        reference=unpacked_reference(packed, bias),
        apply=apply,
        out_features=weight.shape[0],
        apply_add=apply_add,
        label=label,
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
