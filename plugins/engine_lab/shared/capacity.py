"""What fits: bytes of weights and of a cached token, and how many requests, by the ledger that serving starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import Checkpoint, TensorEntry, open_checkpoint
from engine.models.manifest import Manifest
from engine.startup.memory.budget import Budget
from engine.startup.memory.estimate import MemoryEstimate, estimate_memory
from engine.startup.memory.weights import weight_sizes
from engine_lab.shared.errors import EvalError


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one plan. Bytes."""

    weights: int
    kv_per_token: float
    memory: int
    """All there is."""
    budget: int
    """What the engine may take of it: ``memory.fraction``."""
    requests: int
    """Most requests of ``request_tokens`` tokens at once; 0 if not even one fits."""
    request_tokens: int
    beside: int
    """What is neither weights nor KV pool, with so many requests."""


def capacity_of(plan: EnginePlan, bound: BoundEngine, memory: int, request_tokens: int) -> Capacity:
    """``memory``: bytes free on the device before anything is loaded.

    Raises :class:`EvalError` for requests longer than the model allows, and
    :class:`~engine.checkpoint.tensors.CheckpointError` for headers that cannot be read. A directory without weights
    counts as an unquantized checkpoint: its shapes follow from ``config.json``.
    """
    if request_tokens > plan.model.max_position:
        raise EvalError(
            f"--requests-of {request_tokens}: {plan.model.name} has {plan.model.max_position} positions; ask for less"
        )
    kernel = plan.choice("attention_kernel").name
    if plan.dtype not in bound.attention_kernel.capabilities.dtypes:
        raise EvalError(f"attention_kernel={kernel} does not compute in {plan.dtype}; set model.dtype")
    weights = weight_sizes(plan, bound, checkpoint_of(plan, bound))
    budget = Budget(memory, plan.settings.memory.fraction).usable

    def estimate(requests: int) -> MemoryEstimate:
        choice = plan.choice("scheduler")
        scheduler = replace(choice, config={**choice.config, "max_requests": requests})
        variant = replace(plan, max_len=request_tokens, slots={**plan.slots, "scheduler": (scheduler,)})
        return estimate_memory(variant, weights, bound)

    requests = most_requests(estimate, budget, request_tokens)
    found = estimate(max(1, requests))
    return Capacity(
        weights=found.weights,
        kv_per_token=sum(found.pool.block_bytes) / found.pool.block_size,
        memory=memory,
        budget=budget,
        requests=requests,
        request_tokens=request_tokens,
        beside=found.fixed - found.weights,
    )


def most_requests(estimate: Callable[[int], MemoryEstimate], budget: int, tokens: int, shared: int = 0) -> int:
    """The most requests of ``tokens`` tokens that fit in ``budget`` bytes at once, the first ``shared`` of which all
    have in common. ``estimate``: with so many rows. Every request takes more, so halving finds it."""
    fewest, most = 0, max(0, budget // min(filter(None, estimate(1).pool.block_bytes)))
    while fewest < most:
        middle = (fewest + most + 1) // 2
        found = estimate(middle)
        blocks = found.pool.fitting(budget - found.fixed, found.largest_blocks)
        if blocks and found.pool.requests(blocks, tokens, shared) >= middle:
            fewest = middle
        else:
            most = middle - 1
    return fewest


def checkpoint_of(plan: EnginePlan, bound: BoundEngine) -> Checkpoint:
    """Headers of the model's files, or what they would be where there are none."""
    folder = Path(plan.model.path)
    if any(folder.glob("*.safetensors*")) or plan.model.quantization is not None:
        return open_checkpoint(plan.model.path)
    graph, dtype = bound.graph, getattr(torch, plan.model.dtype)
    shapes = {tensor.name: tensor.shape for tensor in Manifest().tensors(graph) if tensor.shape is not None}
    return Checkpoint(
        {name: TensorEntry(folder, dtype, shape, 0, prod(shape) * dtype.itemsize) for name, shape in shapes.items()}
    )
