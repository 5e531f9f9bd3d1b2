"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the ways to stretch it beyond the trained length.

Angles are computed per step from the positions, not looked up in a table: for one step they cost microseconds
whatever the context length, and a rule that depends on the position needs no special case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.contracts.ops import RopeFacts


class Rotary:
    """Cosines and sines for token positions.

    Two kinds depend on the length of the sequence elsewhere. Here nothing does, so that a token's key never depends on
    how a prompt was cut into chunks, on its neighbours in the batch, or on what follows. ``dynamic`` does so beyond the
    length that config.json states, and no sequence is longer (:func:`engine.checkpoint.rope.read_reach`).
    ``longrope`` has factors for sequences up to the trained length and others for longer ones, and keys of one kind
    mean nothing to queries of the other: ``max_len``, the most tokens of a sequence that is served, decides for all.
    """

    def __init__(self, facts: RopeFacts, head_dim: int, max_len: int, device: str) -> None:
        self.dim = facts.rotary_dim or head_dim
        stated = int(facts.params.get("max_position_embeddings") or max_len)
        trained = int(facts.params.get("original_max_position_embeddings") or stated)
        factor = float(facts.params.get("factor") or stated / trained)
        frequencies, self.amplitude = _frequencies(facts, self.dim, trained, factor, max_len > trained)
        """What cosines and sines are multiplied by."""
        self.frequencies = frequencies.float().to(device)
        """Angles of neighbouring positions differ by them: float32 ``[dim / 2]``."""

    def angles(self, positions: Tensor) -> Tensor:
        """Float32 ``[num_tokens, rotary_dim / 2]`` for int64 ``positions [num_tokens]``."""
        return positions[:, None].float() * self.frequencies

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``cos``, ``sin``: ``[num_tokens, 1, rotary_dim / 2]``, scaled by the attention factor of the kind."""
        angles = self.angles(positions)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + rotary_dim/2])`` of each head; what lies beyond ``rotary_dim`` passes through.

    ``x``: ``[num_tokens, num_heads, head_dim]``; ``cos``, ``sin`` from :meth:`Rotary.cos_sin`. Computed in float32.
    """
    half = cos.shape[-1]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[2 i], x[2 i + 1])`` of each head, otherwise as :func:`rotate`."""
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., size:].float()), dim=-1).to(x.dtype)


def paired(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for :func:`rotate_paired`: ``[cos, cos]`` and ``[-sin, sin]``."""
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_paired(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` in three kernel calls and in the dtype of ``x``; for heads that are rotated whole."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def _base_frequencies(theta: float, dim: int) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _frequencies(facts: RopeFacts, dim: int, trained: int, factor: float, is_long: bool) -> tuple[Tensor, float]:
    """Float64 inverse frequencies ``[dim / 2]`` and the factor on cos and sin. ``is_long``: for sequences beyond the
    trained length."""
    base, params = _base_frequencies(facts.theta, dim), facts.params
    if facts.kind in ("default", "dynamic"):
        return base, 1.0
    if facts.kind == "linear":
        return base / factor, 1.0
    if facts.kind == "llama3":
        return _llama3(base, params, trained, factor), 1.0
    if facts.kind == "yarn":
        return _yarn(facts, base, dim, trained, factor), _yarn_amplitude(params, factor)
    if facts.kind == "longrope":
        factors = _factors(params, "long_factor" if is_long else "short_factor", dim)
        return base / factors, _longrope_amplitude(params, factor, trained)
    if facts.kind == "proportional":
        turned = int(float(params["partial_rotary_factor"]) * dim // 2)
        return base / float(params.get("factor", 1.0)) * (torch.arange(dim // 2) < turned), 1.0
    known = "default, linear, dynamic, yarn, llama3, longrope, proportional"
    raise ValueError(f"rope_type {facts.kind!r} of the checkpoint: expected one of {known}")


def _llama3(base: Tensor, params: Mapping[str, Any], trained: int, factor: float) -> Tensor:
    """Slow frequencies are divided by ``factor``, fast ones kept, those between blended."""
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns = trained * base / (2 * math.pi)
    """Full turns of each pair within the trained length."""
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base * (kept + (1.0 - kept) / factor)


def _yarn(facts: RopeFacts, base: Tensor, dim: int, trained: int, factor: float) -> Tensor:
    """YaRN (arXiv 2309.00071), the NTK-by-parts ramp over dimensions."""
    params = facts.params

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(facts.theta))

    start = dimension(float(params.get("beta_fast") or 32))
    end = dimension(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    width = max(end - start, 0.001)
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - start) / width).clamp(0.0, 1.0)
    return base * (1.0 - stretched + stretched / factor)


def _yarn_amplitude(params: Mapping[str, Any], factor: float) -> float:
    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return amplitude(float(params["mscale"])) / amplitude(float(params["mscale_all_dim"]))
    return amplitude(1.0)


def _longrope_amplitude(params: Mapping[str, Any], factor: float, trained: int) -> float:
    """LongRoPE (arXiv 2402.13753)."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(trained))


def _factors(params: Mapping[str, Any], name: str, dim: int) -> Tensor:
    values = params.get(name)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        raise ValueError(f"{name} of the checkpoint's longrope: expected a list of {dim // 2} numbers")
    return torch.tensor(values, dtype=torch.float64)
