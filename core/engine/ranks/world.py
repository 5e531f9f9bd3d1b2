"""Who the ranks of a plan are, and where they reach each other."""

from __future__ import annotations

from engine.assembly.plan import EnginePlan
from engine.contracts.communicator import World

LOOPBACK = "127.0.0.1"


def world_of(plan: EnginePlan, rank: int, host: str = LOOPBACK) -> World:
    """The ranks as one of them sees them."""
    layout = plan.layout
    return World(rank, layout.size, layout.groups(rank), plan.device.kind, plan.call_timeout_s, host)
