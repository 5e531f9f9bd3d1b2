"""Check before loading that the estimate fits the budget, and size the KV pool after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.assembly.bind import BoundEngine, bind
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import CheckpointError
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.models.checkpoint_checks import checked_checkpoint
from engine.models.placement import RankGraph
from engine.startup.memory.budget import Budget, DoesNotFit, free_memory
from engine.startup.memory.estimate import MemoryPlan, estimate_memory
from engine.startup.memory.refusal import refusal
from engine.startup.memory.report import size
from engine.startup.memory.weights import weight_sizes
from engine.startup.placing import placed
from engine.startup.stores import check_stores


@dataclass(frozen=True, slots=True)
class KVPoolSize:
    """The KV pool of an engine."""

    blocks: int
    """Of a group that keeps every token, the padding block included; those of others follow from it
    (:class:`engine.kv.groups.PoolShape`)."""
    max_len: int
    """Most tokens of one request that it holds, at most ``model.max_len``."""
    notes: tuple[str, ...]
    """What the user should know about it."""

    def limited(self, blocks: int, max_len: int, block_size: int) -> KVPoolSize:
        """With no more ``blocks`` than these: another rank has memory for no more."""
        blocks = min(self.blocks, blocks)
        return replace(self, blocks=blocks, max_len=min(max_len, (blocks - 1) * block_size))


def plan_memory(
    plan: EnginePlan, bound: BoundEngine, *, free: int | None = None, own: RankGraph | None = None
) -> MemoryPlan:
    """Estimate before anything is loaded; takes milliseconds. ``free``: bytes, instead of what the device says;
    ``own``: what of the model this rank computes, ``None``: all.

    Raises :class:`DoesNotFit` with what is missing and what to set, and
    :class:`engine.checkpoint.tensors.CheckpointError` for a checkpoint that headers show not to be the model's.
    """
    checkpoint = checked_checkpoint(bound.graph, bound.quantizer, plan.model.path)
    budget = Budget(free_memory(plan.device) if free is None else free, plan.settings.memory.fraction)
    weights = weight_sizes(plan, bound, checkpoint, None if own is None else own.graph)
    estimate = estimate_memory(plan, weights, bound, own)
    if estimate.smallest > budget.usable:
        raise DoesNotFit(refusal(plan, bound, estimate, budget))
    return MemoryPlan(plan, own, estimate, budget)


def check_memory(plan: EnginePlan) -> tuple[MemoryPlan, ...]:
    """Would the plan start here, as far as memory goes? By rank. Builds the engine's plugins and reads the checkpoint's
    headers, but no weight.

    Raises :class:`AssemblyError` with the reasons why not.
    """
    free = free_memory(plan.device) // plan.ranks_per_device
    try:
        bound = bind(plan)
        check_stores(plan, bound)
        return tuple([plan_memory(plan, bound, free=free, own=own) for own in placed(plan, bound)])
    except CheckpointError as error:
        raise AssemblyError([str(error)]) from error


def size_pool(memory: MemoryPlan, weights: int, free_now: int) -> KVPoolSize:
    """The pool that what is free after loading allows, at most what requests can use.

    ``weights``: bytes the weights really took; ``free_now``: bytes free on the device with the weights in place.
    Raises :class:`DoesNotFit` when memory that was free before loading is gone.
    """
    estimate, budget, plan = memory.estimate, memory.budget, memory.plan
    other = estimate.fixed - estimate.weights
    # Steps reuse what loading needed for a moment, so that part of the workspace is taken already.
    still = other - max(estimate.loading, estimate.workspace) + max(0, estimate.workspace - estimate.loading)
    by_free = free_now - budget.headroom - still
    by_budget = budget.usable - other - weights
    blocks = estimate.pool.fitting(min(by_free, by_budget), estimate.largest_blocks)
    if blocks < FEWEST_BLOCKS or (plan.settings.memory.kv_tokens is not None and blocks < estimate.smallest_blocks):
        needed, left = estimate.pool.num_bytes(estimate.smallest_blocks), max(0, min(by_free, by_budget))
        raise DoesNotFit(
            f"the KV pool does not fit after loading: it needs {size(needed)} and {size(left)} are left, of "
            f"{size(budget.free)} that were free before. Either another process took memory meanwhile, or the largest "
            f"step ({size(estimate.workspace)}) or graphs ({size(estimate.graphs)}) take more than estimated. Free "
            "memory, or set a smaller model.max_len, memory.kv_tokens or scheduler.token_budget, or a memory.fraction "
            f"that is really free (now {budget.fraction:g})"
        )
    capacity = (blocks - 1) * estimate.pool.block_size
    return KVPoolSize(blocks, min(plan.max_len, capacity), _pool_notes(memory, capacity))


def _pool_notes(memory: MemoryPlan, capacity: int) -> tuple[str, ...]:
    plan = memory.plan
    if capacity >= plan.max_len:
        return ()
    wanted = plan.settings.memory.kv_tokens
    why = "what is free after loading" if wanted is None else f"memory.kv_tokens={wanted}"
    return (
        f"requests may have {capacity} tokens instead of model.max_len={plan.max_len}: the KV pool holds no more, "
        f"because of {why}",
    )
