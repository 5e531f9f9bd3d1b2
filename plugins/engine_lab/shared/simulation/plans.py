"""From overrides to an engine that can be simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.assembly.assemble import configure, plan_for
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan

HOST_DRAFTER = "host_drafter"
DRAFTS = "drafts"
"""Capabilities of drafters."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan, and what it does not say of its drafter."""

    plan: EnginePlan
    drafting: Literal["host", "device"] | None
    """Where drafts are proposed; ``None``: nowhere."""


def resolve(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Resolved:
    """Raises :class:`~engine.assembly.errors.AssemblyError`, as ``engine serve`` does, and for layouts that are not
    simulated."""
    configured = configure(overrides, config_dirs)
    plan = plan_for(configured)
    if plan.layout.pp > 1:
        raise AssemblyError([f"parallelism.pp={plan.layout.pp}: pipelines are not simulated; use parallelism.pp=1"])
    provides = configured.discovered.named("drafter", plan.choice("drafter").name)[0].provider.provides
    if DRAFTS not in provides or not plan.drafter.max_width:
        return Resolved(plan, None)
    return Resolved(plan, "host" if HOST_DRAFTER in provides else "device")


def most_blocks(plan: EnginePlan) -> int:
    """KV blocks that the plan asks for, the padding block included: of ``memory.kv_tokens``, or as many as all rows can
    ever hold, which is what an engine takes where there is enough memory."""
    wanted = plan.settings.memory.kv_tokens
    tokens = wanted if wanted is not None else plan.scheduler.max_requests * plan.max_len
    return 1 + -(-tokens // plan.block_size)
