"""MXFP4 (OCP Microscaling Formats, version 1.0): numbers of 4 bits, e2m1, and for every 32 inputs a power of two, e8m0.

``blocks`` uint8 ``[out, in / 32, 16]``, the even input in the low half of a byte; ``scales`` uint8 ``[out, in / 32]``,
exponents plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine.kernels.quantized import from_e2m1
from engine_plugins.quantizer.checkpoint.layouts.rule import POWERS, TensorRule, bias_rule
from engine_plugins.quantizer.checkpoint.layouts.values import bias_of
from engine_plugins.quantizer.checkpoint.scheme import Scheme

NOT_A_NUMBER = 255
"""Of e8m0."""


def rules(scheme: Scheme, part: LinearPart, spec: LinearSpec) -> list[TensorRule]:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    out, groups, axes = part.out_features, scheme.groups(spec.in_features), {"out": 0, "in": 1}
    half, group = scheme.block[1] // 2, {"in": scheme.block[1]}
    return [
        TensorRule(StoredTensor("blocks", axes, group), ("uint8",), ((out, groups, half),)),
        TensorRule(StoredTensor("scales", axes, group), ("uint8", POWERS), ((out, groups),)),
        bias_rule(part),
    ]


def read(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], in_features: int, rows: Sequence[Range] | None = None
) -> QuantizedWeight:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    blocks, exponents = tensors["blocks"], tensors["scales"].view(torch.uint8)
    if bool((exponents == NOT_A_NUMBER).any()):
        raise CheckpointError(f"{name}_scales holds {NOT_A_NUMBER}, which is no number")
    bits = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)[:, :in_features]
    # Codes are twice the numbers. A power of two in float32 is exact, also half of the least one.
    scale = torch.exp2(exponents.double() - 128.0).float()
    return QuantizedWeight(from_e2m1(bits), scale, scheme.block[1], scheme.bits, bias=bias_of(tensors), e2m1=True)
