"""Quantized weights of every kind that GPU kernels read, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.quantized import E2M1, from_e2m1
from engine_plugins.quantizer.rounding import to_fp8, to_int4, to_int8

Make = Callable[[Tensor, "Tensor | None"], QuantizedWeight]


def int4_zeros(weight: Tensor, bias: Tensor | None, group_size: int = 32) -> QuantizedWeight:
    """16 levels from the least to the largest weight of a group."""
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
    scale = ((high - low) / 15.0).clamp_min(1e-6).half().float()
    zero = (-8.0 - low / scale).round()
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(-8, 7).to(torch.int8)
    codes = codes.flatten(1)[:, :inputs].contiguous()
    return QuantizedWeight(codes, scale, group_size, bits=4, zero=zero.to(torch.int8), bias=bias)


def int8_groups(weight: Tensor, bias: Tensor | None, group_size: int = 64) -> QuantizedWeight:
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(2) / 127.0).clamp_min(1e-6)
    codes = (groups / scale[..., None]).round().to(torch.int8).flatten(1)[:, :inputs].contiguous()
    return QuantizedWeight(codes, scale, group_size, bias=bias)


def int8_zeros(weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
    made = int8_groups(weight, bias)
    zero = torch.arange(made.scale.numel()).view(made.scale.shape) % 19 - 9
    return replace(made, zero=zero.to(torch.int8))


def int8_zero_per_channel(weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
    made = to_int8(weight, bias)
    return replace(made, zero=torch.full(made.scale.shape, 5, dtype=torch.int8))


def int4_per_channel(weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
    return to_int4(weight, bias, weight.shape[1])


def fp8_blocks(weight: Tensor, bias: Tensor | None, block: int = 128) -> QuantizedWeight:
    """e4m3 with one scale for ``block`` x ``block`` weights."""
    out, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % block, 0, -out % block))
    blocks = padded.view(padded.shape[0] // block, block, -1, block)
    scale = (blocks.abs().amax((1, 3)) / 448.0).clamp_min(1e-6)
    by_channel = scale.repeat_interleave(block, 0)[:out]
    codes = (weight / by_channel.repeat_interleave(block, 1)[:, :inputs]).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, by_channel.contiguous(), block, bias=bias)


def mxfp4(weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
    """e2m1 with a power of two for every 32 inputs."""
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % 32)).unflatten(1, (-1, 32))
    scale = torch.exp2((groups.abs().amax(2).clamp_min(1e-6) / 6.0).log2().ceil()) / 2
    numbers = torch.tensor(E2M1, dtype=torch.float32)
    bits = (groups[..., None] / scale[..., None, None] - numbers).abs().argmin(-1).byte()
    codes = from_e2m1(bits.flatten(1)[:, :inputs])
    return QuantizedWeight(codes, scale, 32, bits=4, bias=bias, e2m1=True)


WEIGHTS: dict[str, Make] = {
    "int8": to_int8,
    "int8 groups": int8_groups,
    "int8 zeros": int8_zeros,
    "int8 zero per channel": int8_zero_per_channel,
    "fp8": to_fp8,
    "fp8 blocks": fp8_blocks,
    "int4 g32": lambda weight, bias: to_int4(weight, bias, 32),
    "int4 g128": lambda weight, bias: to_int4(weight, bias, min(128, weight.shape[1])),
    "int4 per channel": int4_per_channel,
    "int4 zeros": int4_zeros,
    "mxfp4": mxfp4,
}
