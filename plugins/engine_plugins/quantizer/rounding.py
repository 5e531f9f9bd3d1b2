"""Round weights to few bits: what the quantizers do that need no calibration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight, WeightFormat

FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
CLIPS = tuple(1.0 - 0.04 * i for i in range(10))
"""Shares of the largest weight of a group that are tried as the end of its range."""
PIECE, DEVICE_PIECE = 1 << 20, 1 << 23
"""Weights that are rounded at a time on a CPU and elsewhere: rounding takes several copies of them in float32. On a CPU
these are to fit a last-level cache: with four times as many, rounding to int4 took three times as long."""


def rounded(weight: Tensor, bias: Tensor | None, form: WeightFormat, device: str | None = None) -> QuantizedWeight:
    """``[out, in]``, any floating dtype -> ``form``. 8 bits have one scale per output channel. ``device``: where it is
    rounded, and then is; ``None``: where the weight is."""
    if form.bits == 4:
        return to_int4(weight, bias, min(form.group_size, weight.shape[1]), device)
    return to_fp8(weight, bias, device) if form.floating else to_int8(weight, bias, device)


def to_int8(weight: Tensor, bias: Tensor | None, device: str | None = None) -> QuantizedWeight:
    """``[out, in]``, any floating dtype -> 255 levels, one scale per output channel."""
    codes, scale = _in_pieces(weight, torch.int8, _int8_rows, device)
    return QuantizedWeight(codes, scale, weight.shape[1], bits=8, bias=_float(bias))


def to_fp8(weight: Tensor, bias: Tensor | None, device: str | None = None) -> QuantizedWeight:
    """``[out, in]``, any floating dtype -> e4m3, one scale per output channel."""
    codes, scale = _in_pieces(weight, torch.float8_e4m3fn, _fp8_rows, device)
    return QuantizedWeight(codes, scale, weight.shape[1], bits=8, bias=_float(bias))


def to_int4(weight: Tensor, bias: Tensor | None, group_size: int, device: str | None = None) -> QuantizedWeight:
    """``[out, in]``, any floating dtype -> 16 levels, a scale for every ``group_size`` inputs.

    The range of a group ends where the squared error of rounding is least, of :data:`CLIPS` tried.
    """
    codes, scale = _in_pieces(weight, torch.int8, partial(_int4_rows, group_size=group_size), device)
    return QuantizedWeight(codes, scale, group_size, bits=4, bias=_float(bias))


def _in_pieces(
    weight: Tensor, dtype: torch.dtype, rounded: Callable[[Tensor], tuple[Tensor, Tensor]], device: str | None
) -> tuple[Tensor, Tensor]:
    """Codes ``[out, in]`` in ``dtype`` and scales ``[out, groups]``; ``rounded`` makes both of some rows in float32.
    The device never holds all of the weight."""
    codes, scales = torch.empty(weight.shape, dtype=dtype, device=device or weight.device), []
    rows = max(1, (PIECE if codes.device.type == "cpu" else DEVICE_PIECE) // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        codes[start : start + rows], scale = rounded(weight[start : start + rows].to(codes.device).float())
        scales.append(scale)
    return codes, torch.cat(scales)


def _int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127.0).clamp_min(1e-12)
    return (rows / scale).round_().to(torch.int8), scale


def _fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax(dim=1, keepdim=True) / FP8_LARGEST).clamp_min(1e-12)
    return (rows / scale).to(torch.float8_e4m3fn), scale


def _int4_rows(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    groups = grouped(rows, group_size)
    largest = groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-12)
    best, best_error = in_16_bits(largest / 7.0), torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scale = in_16_bits(largest * (clip / 7.0))
        error = (_levels(groups, scale) * scale - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, scale, best), torch.where(better, error, best_error)
    return _levels(groups, best).to(torch.int8).flatten(1)[:, : rows.shape[1]], best.squeeze(2)


def in_16_bits(scale: Tensor) -> Tensor:
    """The nearest float16, so that scales of groups can be kept in two bytes; tiny ones stay as they are."""
    return torch.where(scale >= torch.finfo(torch.float16).smallest_normal, scale.half().float(), scale)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """``[out, in] -> [out, groups, group_size]``, the last group filled with zeros."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group_size))
    return padded.view(weight.shape[0], -1, group_size)


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-8, 7)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
