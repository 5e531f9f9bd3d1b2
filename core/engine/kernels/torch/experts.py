"""Mixtures of experts in torch: which experts a token goes to, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import CountExperts, Experts, Route, Router
from engine.kernels.context import StepContext
from engine.kernels.linear import PackedLinear
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights
from engine.kernels.torch.reference import gated
from engine.models.fuse import Fused
from engine.native import ACTIVATIONS

SMALLEST_SUM = 1e-20
"""By which weights are divided at least."""


def lower_router(lowering: Lowering, op: Router, fused: Fused[Kernel], weights: Weights) -> Lowered:
    weight, bias = weights.router(op)
    return Lowered(lambda context, x: F.linear(x.float(), weight, bias), "float32 F.linear")


def lower_route(lowering: Lowering, op: Route, fused: Fused[Kernel], weights: Weights) -> Lowered:
    names, shape = (op.correction, op.expert_scale), (op.num_experts,)
    correction, scale = (None if name is None else weights.small(name, shape) for name in names)
    return Lowered(lambda context, logits: route(op, logits, correction, scale), "torch top-k")


def route(
    op: Route, logits: Tensor, correction: Tensor | None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :class:`Route`. ``logits``: float32 ``[num_tokens, num_experts]``; ``correction``, ``expert_scale``:
    ``[num_experts]``."""
    scores = logits
    if op.scores == "softmax":
        scores = logits.softmax(dim=-1)
    elif op.scores == "sigmoid":
        scores = logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if op.scores == "sigmoid" and correction is None and op.groups == 1:
        choice = logits
    if op.groups > 1:
        choice = choice.masked_fill(_outside(op, choice), float("-inf"))
    ids = choice.topk(op.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if op.scores == "logits":
        weights = weights.softmax(dim=-1)
    if op.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    weights = weights * op.scale
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def _outside(op: Route, choice: Tensor) -> Tensor:
    """Experts of groups that are not chosen, bool as ``choice``."""
    by_group = choice.view(-1, op.groups, op.num_experts // op.groups)
    best = by_group.amax(dim=-1) if op.group_by == "max" else by_group.topk(2, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(op.chosen_groups, dim=-1).indices, True)
    return ~chosen[:, :, None].expand_as(by_group).flatten(1)


def lower_count_experts(lowering: Lowering, op: CountExperts, fused: Fused[Kernel], weights: Weights) -> Lowered:
    counts = weights.expert_counts(op)

    def count(context: StepContext | None, ids: Tensor) -> None:
        counted = torch.ones_like(ids)
        if context is not None and context.row_ids is not None:
            counted *= (context.row_ids != op.idle_row)[:, None]
        counts.index_add_(0, ids.flatten(), counted.flatten())

    return Lowered(count, "torch index_add_")


def lower_experts(lowering: Lowering, op: Experts, fused: Fused[Kernel], weights: Weights) -> Lowered:
    pairs = weights.experts(op)
    mixed = mixed_by_torch(op, pairs)
    labels = " and ".join(dict.fromkeys(packed.label for packed in pairs[0]))
    label = f"{op.num_experts} experts, {op.top_k} a token, one after another: {labels}"
    waits = "its experts are computed one after another, as many as were chosen"
    return Lowered(lambda context, x, ids, shares: mixed(x, ids, shares), label, waits=waits)


def mixed_by_torch(
    op: Experts, pairs: Sequence[tuple[PackedLinear, PackedLinear]]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One expert after another, each with all rows that go to it. A token's experts are added up in the order of their
    numbers, whoever else is in the batch."""

    def experts(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], op.down.out_features, dtype=torch.float32, device=x.device)
        for number in sorted(set(ids.flatten().tolist()) - {-1}):  # -1: an expert of another rank
            rows, places = (ids == number).nonzero(as_tuple=True)
            gate_up, down = pairs[number]
            read, weight = x.index_select(0, rows), shares[rows, places][:, None]
            if op.weighs_inputs:
                read, weight = (read * weight).to(x.dtype), torch.ones_like(weight)
            out.index_add_(0, rows, expert(op, gate_up, down, read).float() * weight)
        return out.to(x.dtype)

    return experts


def expert(op: Experts, gate_up: PackedLinear, down: PackedLinear, x: Tensor) -> Tensor:
    """One expert's output for the rows that go to it."""
    if op.gated.is_plain and op.gated.act in ACTIVATIONS and gate_up.apply_gated is not None:
        return down.apply(gate_up.apply_gated(x, op.gated.act))
    gate, up = gate_up.apply(x).chunk(2, dim=-1)
    return down.apply(gated(gate, up, op.gated))
