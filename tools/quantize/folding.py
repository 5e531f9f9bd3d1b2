"""Where scales of a layer's inputs go: into the norm, or the output rows, that produce these inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tools.quantize.calibration import Linear
from tools.quantize.scaling import Share
from torch import Tensor

from engine.contracts.ops import DownResidual, LayerOp, NormGateUpAct, NormQKVRopeWrite, NormSpec, OutResidual

Fold = Callable[[Tensor], Tensor]
"""Divides what produces the inputs by scales ``[in]``; returns the scales that this really came to."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer whose inputs can be scaled without computing anything else at run time.

    ``share``: see :data:`tools.quantize.scaling.Share`.
    """

    linear: Linear
    share: Share
    fold: Fold


def sites(ops: Sequence[LayerOp], linears: Mapping[str, Linear], norms: dict[str, Tensor]) -> dict[int, Site]:
    """The linear layers of a layer whose inputs come from a norm or a linear layer in it, by the index of their op.
    ``linears`` by the name of their first part, ``norms`` by checkpoint name: folding changes both."""
    found: dict[int, Site] = {}
    qkv: NormQKVRopeWrite | None = None
    gate_up: Linear | None = None
    for i, op in enumerate(ops):
        if isinstance(op, NormQKVRopeWrite):
            qkv, linear = op, linears[op.qkv.parts[0].name]
            if op.norm is not None:
                found[i] = Site(linear, _alone, _into_norm(linear, op.norm, norms))
        elif isinstance(op, OutResidual):
            assert qkv is not None, "attention comes before its output projection"
            source, heads, size = linears[qkv.qkv.parts[0].name], qkv.num_kv_heads, qkv.head_dim
            linear = linears[op.out.parts[0].name]
            found[i] = Site(linear, _by_head(heads, size), _into_last_part(source, heads, size))
        elif isinstance(op, NormGateUpAct):
            gate_up = linears[op.gate_up.parts[0].name]
            found[i] = Site(gate_up, _alone, _into_norm(gate_up, op.norm, norms))
        elif isinstance(op, DownResidual):
            assert gate_up is not None, "gate and up come before down"
            linear = linears[op.down.parts[0].name]
            found[i] = Site(linear, _alone, _into_last_part(gate_up, 1, op.down.in_features))
    return found


def _alone(values: Tensor) -> Tensor:
    return values


def _by_head(num_kv_heads: int, head_dim: int) -> Share:
    """Query heads that attend to the same value head share its scales. ``[heads * head_dim]`` both ways."""

    def share(values: Tensor) -> Tensor:
        by_head = values.view(num_kv_heads, -1, head_dim)
        return by_head.amax(dim=1, keepdim=True).expand_as(by_head).flatten()

    return share


def _into_norm(linear: Linear, norm: NormSpec, norms: dict[str, Tensor]) -> Fold:
    """Into the weight of a norm. What its dtype rounds away, the linear layer makes up for."""
    name = f"{norm.name}.weight"

    def fold(scales: Tensor) -> Tensor:
        stored = norms[name].to(scales.device)
        new = (stored.float() / scales).to(stored.dtype)
        old, became = stored.float(), new.float()
        usable = (old != 0) & (became != 0)
        norms[name] = torch.where(usable, new, stored).cpu()
        real = torch.where(usable, old / became, 1.0)
        linear.divide = real
        return real

    return fold


def _into_last_part(source: Linear, heads: int, head_dim: int) -> Fold:
    """Into the outputs of the last part of the layer before: values of q, k, v and up of gate, up. They are
    ``heads * head_dim``, and each head may serve several of the inputs (see :func:`_by_head`)."""

    def fold(scales: Tensor) -> Tensor:
        by_row = scales.view(heads, -1, head_dim)[:, 0].flatten()
        total = source.spec.out_features
        rows = slice(total - source.spec.parts[-1].out_features, total)
        source.weight = source.weight.clone()
        source.weight[rows] /= by_row[:, None]
        if source.bias is not None:
            source.bias = source.bias.clone()
            source.bias[rows] /= by_row
        return scales

    return fold
