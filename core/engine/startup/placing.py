"""Which rank holds what of a plan's model."""

from __future__ import annotations

from functools import partial

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.record import recorded
from engine.models.sharding import smallest_cut
from engine.startup.memory.budget import DoesNotFit


def placed(plan: EnginePlan, bound: BoundEngine) -> tuple[RankGraph, ...]:
    """By rank. Raises :class:`DoesNotFit` for a model that cannot be shared out so."""
    try:
        return place(recorded(bound.architecture, plan.model), plan.layout, partial(smallest_cut, bound.quantizer))
    except ValueError as error:
        raise DoesNotFit(str(error)) from error


def holding(own: RankGraph, layout: Layout, rank: int) -> str:
    """``layers 0-15, embedding; share 1 of 2``"""
    first, last = own.stage.first, own.stage.last
    what = [f"layers {first}-{last - 1}" if last - first > 1 else f"layer {first}"]
    what += ["embedding"] * bool(own.graph.embed.nodes) + ["head"] * bool(own.graph.head.nodes)
    share = f"; share {layout.index(rank) + 1} of {layout.tp}" if layout.tp > 1 else ""
    return ", ".join(what) + share
