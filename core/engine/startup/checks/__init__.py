"""Can these plugins compute this model? Asked once they are built, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.errors import listing
from engine.assembly.plan import EnginePlan
from engine.contracts.drafter import on_device
from engine.contracts.graph import Graph, KVSpec
from engine.contracts.kv_allocator import BlockUsage, KVAllocator, KVGroup
from engine.plugin_guard.calls import contract_error, quote
from engine.startup.checks.attention import AttentionCheck
from engine.startup.checks.kv_format import check_kv_format
from engine.startup.memory.budget import DoesNotFit


def check_attention(plan: EnginePlan, bound: BoundEngine) -> None:
    """Raise :class:`DoesNotFit` when the attention kernel cannot compute this model."""
    can, name, model = bound.attention_kernel.capabilities, plan.choice("attention_kernel").name, plan.model
    problems = []
    for dim in sorted({op.head_dim for op in model.attentions if op.value_dim is None}):
        if can.head_dims is not None and dim not in can.head_dims:
            problems.append(f"head_dim {dim}, it supports {listing(map(str, can.head_dims))}")
    groups = sorted({op.num_heads // op.num_kv_heads for op in model.attentions})
    if can.heads_per_kv_head is not None and len(groups) > 1:
        found = f"{', '.join(map(str, groups))} query heads that share a key-value head"
        problems.append(f"{found}, it needs as many in all layers")
    if plan.dtype not in can.dtypes:
        problems.append(f"model.dtype={plan.dtype}, it supports {listing(can.dtypes)}")
    if any(op.window for op in model.attentions) and not can.window:
        problems.append("sliding-window layers")
    if any(op.chunk for op in model.attentions) and not can.chunk:
        problems.append("layers with chunked attention")
    if plan.execution == "graphs" and not can.capturable:
        problems.append("execution=graphs, it cannot be captured")
    if bound.drafter.max_width > can.max_verify_width:
        problems.append(f"drafter.max_width={bound.drafter.max_width}, it verifies at most {can.max_verify_width}")
    if problems:
        raise DoesNotFit(f"attention_kernel={name} cannot run this model: {'; '.join(problems)}")


def check_drafter(plan: EnginePlan, bound: BoundEngine) -> None:
    """Raise :class:`DoesNotFit` when the target or its attention kernel lacks what the drafter needs."""
    drafter, model = on_device(bound.drafter), plan.model
    if drafter is None:
        return
    problems = [
        f"aux_layer {layer}; the model has hidden states 0 to {model.num_layers}"
        for layer in drafter.aux_layers
        if not 0 <= layer <= model.num_layers
    ]
    head_dims, kv = bound.attention_kernel.capabilities.head_dims, drafter.kv
    own = {spec.head_dim for spec in kv.caches if isinstance(spec, KVSpec)} if kv is not None else set()
    for dim in sorted(own.difference(head_dims or own)):
        kernel = f"attention_kernel={plan.choice('attention_kernel').name}"
        problems.append(f"head_dim {dim}; {kernel} supports {listing(map(str, head_dims or ()))}")
    if kv is not None and kv.shared_layers > model.num_layers:
        problems.append(f"the first {kv.shared_layers} layers; the model has {model.num_layers}")
    if problems:
        name, needs = plan.choice("drafter").name, ", and ".join(f"it needs {problem}" for problem in problems)
        raise DoesNotFit(
            f"drafter={name} does not fit {plan.model.name}: {needs} (choose another drafter or attention_kernel; "
            "drafter.max_width=0 drafts nothing)"
        )


def check_pool(allocator: KVAllocator, groups: Sequence[KVGroup]) -> None:
    """Raise :class:`~engine.plugin_guard.calls.PluginError` when an allocator that has just been started does not have
    all blocks of each group but the padding block."""
    usage, totals = allocator.usage(), [group.num_blocks - 1 for group in groups]
    expected = tuple(BlockUsage(total, total, 0, 0) for total in totals)
    if usage != expected:
        raise contract_error(allocator, "usage", f"returned {quote(usage)} after start(), expected {expected}")


@torch.inference_mode()
def try_plugins(plan: EnginePlan, bound: BoundEngine, own: Graph | None = None) -> None:
    """What can be tried without weights: the model's description, the cache's format, attention. Linear layers are
    tried when they are loaded. ``own``: what of the model this rank computes, ``None``: all. Raises
    :class:`~engine.plugin_guard.calls.PluginError`."""
    model, device = plan.model, plan.device.kind
    check_kv_format(bound.kv_format, model.num_kv_heads, model.head_dim, getattr(torch, plan.dtype), device)
    attention = AttentionCheck(
        bound.attention_kernel, bound.kv_format, plan.dtype, device, bound.context.block_size,
        plan.max_len, bound.context.max_requests,
    )  # fmt: skip
    attention(bound.graph if own is None else own)
