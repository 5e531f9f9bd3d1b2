"""Which experts a token goes to: the router's product in float32, and the choice by its logits.

One kernel for few rows: a program multiplies one expert's row of the router, and the last of a token's programs
chooses. For many rows the product is torch's, and a program chooses for one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.ops import Route
from engine.kernels.torch.experts import SMALLEST_SUM
from engine.kernels.triton.arrival import arrive
from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.product import load_row
from engine.kernels.triton.tile_ops import below, start_dependents, wait_for_input
from engine.kernels.triton.tiles import MAX_ROWS

MOST_EXPERTS = 1024
_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)
_NONE = tl.constexpr(2147483647)


@triton.jit
def take_best(values, index, taken):
    """Lowest ``index`` of the largest of ``values`` that are not ``taken``. NaN counts as infinity."""
    values = tl.where(taken, float("-inf"), tl.where(values == values, values, float("inf")))
    best = tl.max(tl.ravel(values), 0)
    return tl.min(tl.ravel(tl.where((values == best) & (taken == 0), index, _NONE)), 0)


@triton.jit
def outside_groups(
    choice, real, SIZE: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Experts ``[BLOCK_G, BLOCK_S]`` of groups that are not chosen."""
    choice = tl.where(real, choice, float("-inf"))
    group = tl.arange(0, BLOCK_G)
    best = tl.max(choice, 1)
    if BY_TWO:
        member = tl.broadcast_to(tl.arange(0, BLOCK_S)[None, :], choice.shape)
        first = tl.min(tl.where(choice == best[:, None], member, _NONE), 1)
        best += tl.max(tl.where(member == first[:, None], float("-inf"), choice), 1)
    left = group >= GROUPS
    for _ in range(CHOSEN_GROUPS):
        left |= group == take_best(best, group, left)
    return ((left == 0) | (group >= GROUPS))[:, None] & real


@triton.jit
def route(
    logits_ptr, correction_ptr, expert_scale_ptr, own_ptr, id_ptr, weight_ptr, row, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORES: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """See :class:`engine.contracts.ops.Route`: experts lie as ``[groups, experts of a group]``. Whatever the logits
    are, ids are different experts that exist; with ``own_ptr [NUM_EXPERTS]`` an id says which of a rank's own experts
    that is, and -1 that it is another rank's."""
    SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    index, real = group * SIZE + member, (group < GROUPS) & (member < SIZE)
    # Past this multiprocessor's own cache: other programs of the launch may have stored them.
    scores = tl.load(logits_ptr + row * NUM_EXPERTS + index, mask=real, other=float("-inf"), cache_modifier=".cg")
    logits = scores
    if SCORES == "softmax":
        shifted = tl.exp(scores - tl.max(tl.ravel(scores), 0))
        scores = tl.div_rn(shifted, tl.zeros_like(shifted) + tl.sum(tl.ravel(shifted), 0))
    elif SCORES == "sigmoid":
        scores = tl.div_rn(tl.zeros_like(scores) + 1.0, 1.0 + tl.exp(-scores))
    choice = scores
    if SCORES == "sigmoid" and GROUPS == 1:
        choice = logits  # sigmoids of large ones are equal
    if correction_ptr is not None:
        choice = scores + tl.load(correction_ptr + index, mask=real, other=0.0)
    if GROUPS > 1:
        outside = outside_groups(choice, real, SIZE, GROUPS, CHOSEN_GROUPS, BY_TWO, BLOCK_G, BLOCK_S)
        choice = tl.where(outside, float("-inf"), choice)
    taken = real == 0
    place = tl.arange(0, BLOCK_K)
    ids, weights = tl.zeros([BLOCK_K], tl.int32), tl.full([BLOCK_K], float("-inf"), tl.float32)
    for k in range(TOP_K):
        best = take_best(choice, index, taken)
        taken |= index == best
        ids = tl.where(place == k, best, ids)
        weights = tl.where(place == k, tl.sum(tl.ravel(tl.where(index == best, scores, 0.0)), 0), weights)
    if SCORES == "logits":
        shifted = tl.exp(weights - tl.max(weights, 0))
        weights = tl.div_rn(shifted, tl.zeros_like(shifted) + tl.sum(shifted, 0))
    mask = place < TOP_K
    if RENORMALIZE:
        total = tl.sum(tl.where(mask, weights, 0.0), 0) + _SMALLEST_SUM
        weights = tl.div_rn(weights, tl.zeros_like(weights) + total)
    if expert_scale_ptr is not None:
        weights *= tl.load(expert_scale_ptr + ids)
    if own_ptr is not None:
        ids = tl.load(own_ptr + ids)
    at = row * TOP_K + place
    tl.store(id_ptr + at, ids.to(tl.int64), mask=mask)
    tl.store(weight_ptr + at, weights * scale, mask=mask)


@triton.jit
def route_rows(
    logits_ptr, correction_ptr, expert_scale_ptr, own_ptr, id_ptr, weight_ptr, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORES: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``logits [rows, NUM_EXPERTS]`` float32 -> ids int64 and weights float32, ``[rows, TOP_K]``. Program ``row``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    route(
        logits_ptr, correction_ptr, expert_scale_ptr, own_ptr, id_ptr, weight_ptr, tl.program_id(0).to(tl.int64), scale,
        NUM_EXPERTS, TOP_K, SCORES, RENORMALIZE, GROUPS, CHOSEN_GROUPS, BY_TWO,
        BLOCK_G, BLOCK_S, BLOCK_K,
    )  # fmt: skip


@triton.jit
def load_normed(x_ptr, norm_ptr, start, rms, IN_FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of the row, float32 ``[BLOCK]``, normed and rounded as torch does before a router's product."""
    x, _ = load_row(x_ptr, None, start, IN_FEATURES, BLOCK)
    if norm_ptr is None:
        return x
    else:
        column = start + tl.arange(0, BLOCK)
        weight = tl.load(norm_ptr + column, mask=below(column, IN_FEATURES, BLOCK), other=0.0).to(tl.float32)
        return (x * rms * weight).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def choose_experts(
    x_ptr, norm_ptr, router_ptr, bias_ptr, correction_ptr, expert_scale_ptr, own_ptr, logits_ptr, arrived_ptr,
    id_ptr, weight_ptr, stride_x, eps, scale,
    IN_FEATURES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORES: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x [rows, IN_FEATURES]``, with ``norm_ptr`` its RMSNorm -> the same; ``router [NUM_EXPERTS, IN_FEATURES]`` and
    ``bias``: float32. Program ``(expert, row)``. ``arrived_ptr``: int32, one per row, 0 before and after."""
    start_dependents(PDL)
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    router_ptr += expert * IN_FEATURES
    router = tl.load(router_ptr + column, mask=below(column, IN_FEATURES, BLOCK), other=0.0)
    wait_for_input(PDL)
    x_ptr += row * stride_x
    rms = 1.0
    if norm_ptr is not None:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, IN_FEATURES, BLOCK):
            x, _ = load_row(x_ptr, None, start, IN_FEATURES, BLOCK)
            squares += x * x
        rms = tl.rsqrt(tl.sum(squares, 0) / IN_FEATURES + eps)
    products = router * load_normed(x_ptr, norm_ptr, 0, rms, IN_FEATURES, BLOCK)
    for start in range(BLOCK, IN_FEATURES, BLOCK):
        router = tl.load(router_ptr + start + column, mask=below(start + column, IN_FEATURES, BLOCK), other=0.0)
        products += router * load_normed(x_ptr, norm_ptr, start, rms, IN_FEATURES, BLOCK)
    logit = tl.sum(products, 0)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + expert)
    tl.store(logits_ptr + row * NUM_EXPERTS + expert, logit)
    if arrive(arrived_ptr + row) == NUM_EXPERTS - 1:
        route(
            logits_ptr, correction_ptr, expert_scale_ptr, own_ptr, id_ptr, weight_ptr, row, scale,
            NUM_EXPERTS, TOP_K, SCORES, RENORMALIZE, GROUPS, CHOSEN_GROUPS, BY_TWO,
            BLOCK_G, BLOCK_S, BLOCK_K,
        )  # fmt: skip
        tl.store(arrived_ptr + row, 0)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The router of a layer and its route. ``router [num_experts, in_features]``, ``bias``, ``correction`` and
    ``expert_scale [num_experts]``: float32. ``arrived``: int32 zeros ``[MAX_ROWS]``."""

    launch: Launch
    op: Route
    router: Tensor
    bias: Tensor | None
    correction: Tensor | None
    arrived: Tensor
    expert_scale: Tensor | None = None
    own: Tensor | None = None
    """int64 ``[num_experts]``, where ranks share out experts: the id of each among this rank's own, -1 for others'."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [rows, in_features]`` -> ids int64 and weights float32, ``[rows, top_k]``."""
        if x.shape[0] > MAX_ROWS:
            return self.of_logits(F.linear(x.float(), self.router, self.bias))
        return self.of_few(x, None)

    def of_few(self, x: Tensor, norm: NormWeight | None) -> tuple[Tensor, Tensor]:
        """The same of up to :data:`MAX_ROWS` rows, normed first if there is a ``norm``."""
        assert x.stride(1) == 1 and x.shape[0] <= MAX_ROWS
        rows, (experts, in_features) = x.shape[0], self.router.shape
        ids, weights = self._empty(x)
        logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
        block = min(2048, triton.next_power_of_2(in_features))
        choose_experts[(experts, rows)](
            x, norm and norm.weight, self.router, self.bias, self.correction, self.expert_scale, self.own, logits,
            self.arrived, ids, weights, x.stride(0), norm.eps if norm else 0.0, self.op.scale,
            IN_FEATURES=in_features, BLOCK=block, **self._constants(), **self.launch.options(4),
        )  # fmt: skip
        return ids, weights

    def of_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The same of contiguous float32 logits ``[rows, num_experts]``."""
        ids, weights = self._empty(logits)
        route_rows[(logits.shape[0],)](
            logits, self.correction, self.expert_scale, self.own, ids, weights, self.op.scale,
            **self._constants(), **self.launch.options(1),
        )  # fmt: skip
        return ids, weights

    def _empty(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.empty(x.shape[0], self.op.top_k, dtype=torch.int64, device=x.device)
        return ids, torch.empty(ids.shape, dtype=torch.float32, device=x.device)

    def _constants(self) -> dict[str, Any]:
        op = self.op
        return {
            "NUM_EXPERTS": op.num_experts,
            "TOP_K": op.top_k,
            "SCORES": op.scores,
            "RENORMALIZE": op.renormalize,
            "GROUPS": op.groups,
            "CHOSEN_GROUPS": op.chosen_groups,
            "BY_TWO": op.group_by == "top2",
            "BLOCK_G": triton.next_power_of_2(op.groups),
            "BLOCK_S": triton.next_power_of_2(op.num_experts // op.groups),
            "BLOCK_K": triton.next_power_of_2(op.top_k),
        }
