"""Which rank holds what of a plan's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.drafter import on_device
from engine.models.expert_load import counted, imbalance
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.sharding import smallest_cut
from engine.ranks.messages import RankInfo
from engine.startup.memory.budget import DoesNotFit
from engine.startup.memory.estimate import MemoryPlan


def placed(plan: EnginePlan, bound: BoundEngine) -> tuple[RankGraph, ...]:
    """By rank. Raises :class:`DoesNotFit` for a model that cannot be shared out so."""
    drafter = on_device(bound.drafter)
    if plan.layout.pp > 1 and drafter is not None and drafter.kv is not None and drafter.kv.shared_layers:
        raise DoesNotFit(
            f"drafter={plan.choice('drafter').name} runs the model's first {drafter.kv.shared_layers} layers, which "
            f"parallelism.pp={plan.layout.pp} puts elsewhere than the head; use parallelism.pp=1 or another drafter"
        )
    if plan.layout.dcp > 1 and drafter is not None and drafter.kv is not None and drafter.kv.shared_layers:
        raise DoesNotFit(
            f"drafter={plan.choice('drafter').name} reads what the model's first {drafter.kv.shared_layers} layers "
            f"cache, and parallelism.dcp={plan.layout.dcp} has each rank cache some tokens; use parallelism.dcp=1 or "
            "another drafter"
        )
    units = partial(smallest_cut, bound.quantizer)
    load = dict(plan.expert_load) or None
    try:
        first, *others = place(
            bound.graph,
            plan.layout,
            units,
            drafts=drafter is not None,
            stage_layers=plan.parallelism.stage_layers,
            load=load,
        )
        if plan.parallelism.count_experts:  # routers are on every rank, so one counts for all
            first = replace(first, graph=counted(first.graph, bound.context.max_requests))
        return first, *others
    except ValueError as error:
        raise DoesNotFit(str(error)) from error


def describe_expert_load(plan: EnginePlan) -> str:
    """What a plan with ``parallelism.expert_load`` gains by it, on one line."""
    before, after = imbalance(dict(plan.expert_load), plan.layout.ep)
    return (
        f"experts placed by load: of {plan.layout.ep} shares the busiest is expected to be chosen {after:.2f} times as "
        f"often as the mean; in order of their numbers {before:.2f} times"
    )


def holding(own: RankGraph, layout: Layout, rank: int) -> str:
    """``layers 0-15, embedding; share 1 of 2``"""
    first, last = own.stage.first, own.stage.last
    what = [f"layers {first}-{last - 1}" if last - first > 1 else f"layer {first}"]
    what += ["embedding"] * bool(own.graph.embed.nodes) + ["head"] * bool(own.graph.head.nodes)
    share = f"; share {layout.index(rank) + 1} of {layout.tp}" if layout.tp > 1 else ""
    tokens = f"; stretch {layout.index(rank) % layout.dcp + 1} of {layout.dcp} of every KV block"
    part = f"; part {layout.part(rank) + 1} of {layout.pcp} of large steps"
    return ", ".join(what) + share + (tokens if layout.dcp > 1 else "") + (part if layout.pcp > 1 else "")


def rank_infos(plan: EnginePlan, memory: Sequence[MemoryPlan]) -> tuple[RankInfo, ...]:
    """What is known of every rank before it starts. ``memory``: by rank."""
    found = []
    for rank, each in enumerate(memory):
        assert each.own is not None
        estimate = each.estimate
        blocks = estimate.pool.fitting(each.budget.usable - estimate.fixed, estimate.largest_blocks)
        holds, kv = holding(each.own, plan.layout, rank), estimate.pool.num_bytes(blocks)
        found.append(RankInfo(rank, "", holds, estimate.weights, kv, blocks))
    return tuple(found)
