"""Attention where ranks cache different tokens (decode context parallelism): each attends to its own, and what comes
out is merged.

Every rank computes the queries of all ranks of its group ``dcp`` on the keys that it has, and sends each rank the
outputs of that rank's heads and their log-sum-exp, in one call (Helix Parallelism, arXiv 2507.07120).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.attention_kernel import LogSumExpAttention
from engine.contracts.ops import SharedAttention
from engine.kernels.context import StepContext
from engine.kernels.cpu.program import NotNative, Value
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights, cache_of
from engine.models.fuse import Fused

GROUP = "dcp"
NOT_NATIVE = "ranks merge what each attended to"


def lower_shared_attention(lowering: Lowering, op: SharedAttention, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """By the plan's attention kernel."""
    kernel, collectives, (node,) = lowering.attention, lowering.collectives, fused.nodes
    assert isinstance(kernel, LogSumExpAttention), "negotiation asks for it"
    assert collectives is not None and node.heads is not None
    index, each, numbers = cache_of(lowering, node), op.attention, op.attention.out_dim + 1
    sinks = None
    if node.sinks is not None:
        sinks = weights.small(node.sinks, (node.heads.whole,))[node.heads.start : node.heads.stop].contiguous()
    first, last = op.shares[op.index]

    def attention(context: StepContext, q: Tensor) -> Tensor:
        if isinstance(q, Value):
            raise NotNative(NOT_NATIVE)
        cache, tokens = context.kv.layers[index], q.shape[0]
        heads = q.view(tokens, each.num_heads, each.head_dim)
        out, lse = kernel.forward_lse(context.prepared[cache.group], each, heads, cache)
        found = torch.cat((out.view(tokens, each.num_heads, each.out_dim).float(), lse[..., None]), dim=2)
        parts = [found[:, start:stop].contiguous() for start, stop in op.shares]
        received = [found.new_empty(tokens, last - first, numbers) for _ in op.shares]
        collectives.all_to_all(parts, GROUP, received)
        return merged(received, sinks).flatten(1).to(q.dtype)

    label = f"{kernel.label(each, lowering.dtype_name, lowering.kv_format)}, merged from {len(op.shares)} ranks"
    return Lowered(attention, label, NOT_NATIVE)


def merged(parts: Sequence[Tensor], sinks: Tensor | None = None) -> Tensor:
    """Attention to all keys, float32 ``[num_tokens, heads, dim]``.

    ``parts``: of each rank float32 ``[num_tokens, heads, dim + 1]``, its output and after it the natural log-sum-exp
    of its scores: ``-inf`` where it has no key, whose output means nothing. ``sinks``: float32 ``[heads]``, one more
    logit each. The weight of a rank is ``exp(lse - max)``.
    """
    together = torch.stack(tuple(parts))
    out, lse = together[..., :-1], together[..., -1:]
    out = torch.where(lse == float("-inf"), 0.0, out)
    largest = lse.amax(dim=0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks[:, None])
    weights = (lse - largest).exp()
    total = weights.sum(dim=0)
    if sinks is not None:
        total = total + (sinks[:, None] - largest).exp()
    return (weights * out).sum(dim=0) / total
