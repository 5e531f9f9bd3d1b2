"""What must be the same where an engine and where its server or its first rank is: software, plan and checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from engine.assembly.device_facts import cuda_facts, num_cuda_devices
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.ranks.messages import Hello, Present, Versions
from engine.startup.fingerprint import checkpoint_hash, other_source, plan_hash, plugin_digests, versions


def hello() -> Hello:
    """What this process is, before it knows anything."""
    cuda, _ = cuda_facts()
    cores = len(os.sched_getaffinity(0))
    return Hello(versions(), socket.gethostname(), os.getpid(), num_cuda_devices() if cuda else 0, cores)


def present(plan: EnginePlan) -> Present:
    """What this process makes of a plan."""
    return Present(plan_hash(plan), checkpoint_hash(plan.model.path), plugin_digests(plan))


def check_hello(name: str, hello: Hello, ours: Versions, plan: EnginePlan, own: str) -> None:
    """Raises :class:`AssemblyError`. ``name``: who is there, for messages; ``own``: who it must agree with."""
    for what in ("engine", "python", "torch"):
        mine, its = getattr(ours, what), getattr(hello.versions, what)
        if mine != its:
            raise AssemblyError([f"{name} has {what} {its}, and {own} has {what} {mine}: install the same on all"])
    _compare_source(name, ours.source, hello.versions.source, own)
    if plan.device.kind == "cuda" and not hello.cuda_devices:
        raise AssemblyError(
            [f"{name} sees no CUDA device, and {own} runs on one: set CUDA_VISIBLE_DEVICES there, or use device=cpu"]
        )


def check_present(name: str, present: Present, plan: EnginePlan, own: str) -> None:
    """As :func:`check_hello`."""
    own_plan, own_files = plan_hash(plan), checkpoint_hash(plan.model.path)
    if present.plan_hash != own_plan:
        raise AssemblyError(
            [f"{name} reads plan {present.plan_hash}, and {own} has plan {own_plan}: install the same engine and "
             "plugins on all"]
        )  # fmt: skip
    _compare_source(name, plugin_digests(plan), present.plugins, own)
    if present.checkpoint_hash != own_files:
        raise AssemblyError(
            [f"{name} finds checkpoint {present.checkpoint_hash or 'no files'} in model.path={plan.model.path}, and "
             f"{own} finds {own_files}: put the same files there on all machines"]
        )  # fmt: skip


def _compare_source(name: str, ours: Mapping[str, str], theirs: Mapping[str, str], own: str) -> None:
    if differs := other_source(ours, theirs, own):
        raise AssemblyError([f"{name} has other source than {own}: {differs}; install the same on all"])
