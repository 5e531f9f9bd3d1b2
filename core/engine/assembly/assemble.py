"""Everything between a list of overrides and a plan, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.assembly.choosing import plugin_problems
from engine.assembly.compose import Composed, compose, plugin_settings, usable
from engine.assembly.device_facts import device_facts
from engine.assembly.discovery import Discovered, discover
from engine.assembly.errors import AssemblyError
from engine.assembly.expert_load import with_expert_load
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.assembly.plan import EnginePlan
from engine.assembly.threads import with_threads


@dataclass(frozen=True, slots=True)
class Configured:
    """What is installed and what is asked for, before model and device are looked at."""

    discovered: Discovered
    composed: Composed


def configure(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Configured:
    """Discover and compose. Raises :class:`AssemblyError`."""
    discovered = usable(discover(plugin_settings(overrides)))
    return Configured(discovered, compose(overrides, discovered, config_dirs))


def plan_for(configured: Configured, *, download: bool = False) -> EnginePlan:
    """Look at model and device and resolve. Raises :class:`AssemblyError` with all problems."""
    settings = configured.composed.settings
    problems: list[str] = []
    model = device = None
    try:
        model = model_config(settings.model.path, settings.model.name, download=download)
    except AssemblyError as error:
        problems += error.problems
    try:
        device = device_facts(settings.device)
    except AssemblyError as error:
        problems += error.problems
    if model is None or device is None:
        raise AssemblyError([*problems, *plugin_problems(configured.composed, configured.discovered)])
    plan = resolve(configured.composed, configured.discovered, model, device)
    return with_threads(with_expert_load(plan), os.environ)


def assemble(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path] = (), download: bool = False) -> EnginePlan:
    """The plan for these overrides (``["+preset=latency", "model.path=DIR"]``).

    ``download``: a hub id that is not cached may be fetched. Raises :class:`AssemblyError` with every problem.
    """
    return plan_for(configure(overrides, config_dirs), download=download)


def alone(plan: EnginePlan) -> EnginePlan:
    """The plan, for who runs its engine without a server. Raises :class:`AssemblyError` for one of several engines,
    which would be given a part of the machine alone, and for one that somebody else starts."""
    if (replicas := plan.settings.fleet.replicas) > 1:
        raise AssemblyError(
            [f"fleet.replicas={replicas}: here is one engine without a server; leave it out, or run engine serve"]
        )
    if plan.launcher is not None:
        raise AssemblyError(
            [f"fleet.launcher={plan.launcher.name}: here is one engine of no server; leave it out, or run engine serve"]
        )
    return plan
