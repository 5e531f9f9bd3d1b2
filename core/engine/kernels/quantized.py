"""Quantized weights: what they stand for, and what several of them are together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of a sign, two bits of exponent and one of mantissa, by their bits (OCP Microscaling Formats)."""


def from_e2m1(bits: Tensor) -> Tensor:
    """uint8 0 .. 15 -> int8 codes: twice the numbers."""
    return torch.tensor(E2M1, dtype=torch.int8, device=bits.device)[bits.int()]


def to_e2m1(codes: Tensor) -> Tensor:
    """The inverse of :func:`from_e2m1`, uint8; 0 has no sign. In bytes throughout: codes may be all of a layer."""
    magnitude = codes.abs()
    bits = magnitude.clamp(max=4)
    for above in (6, 8, 12):
        bits += magnitude >= above
    return bits.add_((codes < 0).to(torch.int8), alpha=8).view(torch.uint8)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Parts of one layer (q, k, v; gate, up) as one weight, output channels one part after another.

    Raises ``ValueError`` for parts that one matrix cannot hold: other bits, groups, kinds of codes or orders.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        for what, one, other in (
            ("bits", first.bits, part.bits),
            ("codes", first.codes.dtype, part.codes.dtype),
            ("kinds of codes", first.kind, part.kind),
            ("group sizes", first.group_size, part.group_size),
        ):
            if one != other:
                raise ValueError(f"parts that are multiplied together have different {what}: {one} and {other}")
        if not _same_order(first.order, part.order):
            raise ValueError(
                "parts that are multiplied together have different orders of their input features; experts are "
                "multiplied one after another with execution=eager"
            )
    return replace(
        first,
        codes=_stacked([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero=_filled(parts, lambda part: part.zero, lambda part: torch.zeros_like(part.scale, dtype=torch.int8)),
        bias=_filled(parts, lambda part: part.bias, lambda part: part.scale.new_zeros(part.out_features)),
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _stacked(codes: Sequence[Tensor]) -> Tensor:
    if not codes[0].is_floating_point():
        return torch.cat(list(codes))
    return torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)


def _filled(
    parts: Sequence[QuantizedWeight],
    get: Callable[[QuantizedWeight], Tensor | None],
    default: Callable[[QuantizedWeight], Tensor],
) -> Tensor | None:
    """What some parts have, for all of them; ``None`` if none has it."""
    found = [get(part) for part in parts]
    if all(tensor is None for tensor in found):
        return None
    return torch.cat([default(part) if tensor is None else tensor for part, tensor in zip(parts, found, strict=True)])


def paired(codes: Tensor) -> Tensor:
    """4-bit codes, int8 ``[out, in]`` -> uint8 ``[out, ceil(in / 2)]``, the even input feature in the low half."""
    unsigned = F.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8)
    return unsigned[:, 0::2] & 15 | unsigned[:, 1::2] << 4


def unpaired(pairs: Tensor, in_features: int) -> Tensor:
    """The inverse of :func:`paired`."""
    halves = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, :in_features]
    return ((halves ^ 8).to(torch.int8) - 8).contiguous()


def rounded_rows(x: Tensor, activations: str) -> Tensor:
    """``x [M, in]`` as float32, each row rounded to what 8-bit activations can hold (``int8``: 255 levels, ``fp8``:
    e4m3) with a scale of its own; unchanged for ``bf16``."""
    wide = x.float()
    if activations == "bf16":
        return wide
    codes, step = quantized_rows(wide, activations)
    return codes.float() * step


def quantized_rows(x: Tensor, activations: str) -> tuple[Tensor, Tensor]:
    """Each row in 8 bits: int8 or float8_e4m3fn ``[M, in]`` and float32 steps ``[M, 1]``, ``x ~ codes * step``."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    if activations == "int8":
        step = (largest / 127.0).clamp_min(1e-20)
        return (wide / step).round_().to(torch.int8), step
    step = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-20)
    return (wide / step).to(torch.float8_e4m3fn), step


def multiplied(x: Tensor, weight: QuantizedWeight, activations: str) -> Tensor:
    """``x [M, in] -> [M, out]`` in the dtype of ``x``: dequantize, then multiply, in float32. The definition."""
    return F.linear(rounded_rows(x, activations), weight.dense(), weight.bias).to(x.dtype)
