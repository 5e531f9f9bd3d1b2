"""A byte for each weight ``[out, in]``: e4m3 numbers or integer codes, with scales for the tensor, for output features,
for groups or for blocks. compressed-tensors, ``fp8`` and ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine_plugins.quantizer.checkpoint.layouts.rule import BOTH, FLOATS, INTEGERS, TensorRule, bias_rule, scale_rules
from engine_plugins.quantizer.checkpoint.layouts.values import (
    bias_of,
    entry_of_each,
    first_of,
    fixed_scale,
    no_zeros,
    whole,
)
from engine_plugins.quantizer.checkpoint.scheme import Scheme

ZEROS = "weight_zero_point"
OF_INPUTS = ("input_scale", "activation_scale", "input_zero_point")
"""Scales for activations that were measured beforehand: not used, each row of activations has its own."""


def rules(scheme: Scheme, part: LinearPart, spec: LinearSpec) -> list[TensorRule]:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    shape = (part.out_features, spec.in_features)
    dtype = "float8_e4m3fn" if scheme.floating else "int8"
    scales = scale_rules(scheme, part, spec.in_features)
    zeros = StoredTensor(
        ZEROS,
        scales[0].stored.shard_axes,
        scales[0].stored.per_entry,
        optional=scheme.symmetric,
        replicated=scales[0].stored.replicated,
        overlapping=scales[0].stored.overlapping,
    )
    unused = [
        TensorRule(StoredTensor(name, optional=True, replicated=BOTH), (*FLOATS, *INTEGERS)) for name in OF_INPUTS
    ]
    return [
        TensorRule(StoredTensor("weight", {"out": 0, "in": 1}), (dtype,), (shape,)),
        *scales,
        TensorRule(zeros, (*INTEGERS, *FLOATS, "float8_e4m3fn"), scales[0].shapes),
        *unused,
        bias_rule(part),
    ]


def read(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], in_features: int, rows: Sequence[Range] | None = None
) -> QuantizedWeight:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    codes = tensors["weight"]
    _check_codes(scheme, f"{name}.weight", codes)
    scale_name, stored = first_of(tensors, scheme.scale_names, name)
    out, inputs = codes.shape
    group_size = min(scheme.group_size(in_features), inputs)
    groups = -(-inputs // group_size)
    scale = _spread(scheme, fixed_scale(scale_name, stored), rows or ((0, out),), groups)
    zero = tensors.get(ZEROS)
    if scheme.symmetric:
        no_zeros(f"{name}.{ZEROS}", zero)
        zero = None
    elif zero is not None:
        zero = _spread(scheme, whole(f"{name}.{ZEROS}", zero, scheme.bits), rows or ((0, out),), groups).contiguous()
    return QuantizedWeight(
        codes.contiguous(), scale.contiguous(), group_size, scheme.bits, zero=zero, bias=bias_of(tensors)
    )


def _check_codes(scheme: Scheme, name: str, codes: Tensor) -> None:
    if scheme.floating:
        if bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise CheckpointError(f"{name} holds NaN")
    elif scheme.bits < 8:
        low, high = int(codes.min()), int(codes.max())
        half = 1 << (scheme.bits - 1)
        if low < -half or high >= half:
            raise CheckpointError(f"{name} has codes {low} to {high}, {scheme.bits} bits hold {-half} to {half - 1}")


def _spread(scheme: Scheme, values: Tensor, rows: Sequence[Range], groups: int) -> Tensor:
    """``[out, groups]`` from what the scheme stores of ``rows``."""
    out = sum(stop - start for start, stop in rows)
    if scheme.granularity == "tensor":
        return values.reshape(1, 1).expand(out, groups)
    if scheme.granularity == "block":
        return values.reshape(-1, groups)[entry_of_each(rows, scheme.block[0])]
    return values.reshape(out, groups)
