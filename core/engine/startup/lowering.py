"""How a plan's models are lowered."""

from __future__ import annotations

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.graph import Graph
from engine.kernels.backends import kernels_for, rotations
from engine.kernels.settings import Lowering


def lowering_of(plan: EnginePlan, bound: BoundEngine, graph: Graph) -> Lowering:
    """Of the target."""
    return Lowering(
        device=plan.device.kind,
        dtype=getattr(torch, plan.dtype),
        attention=bound.attention_kernel,
        kv_format=bound.kv_format,
        rotations=rotations(graph),
        kernels=kernels_for(plan.execution, plan.device.kind),
    )
