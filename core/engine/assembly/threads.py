"""How many CPU threads each rank computes with, and what the user should know about that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from engine.assembly.plan import EnginePlan

VARIABLE = "OMP_NUM_THREADS"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Is set in processes that torchrun has started. It sets the other one to 1 where nobody has set it."""


def cores_of(plan: EnginePlan) -> int:
    """CPU threads for one rank: ``threads``, or its share of the cores."""
    return plan.settings.threads or max(1, len(os.sched_getaffinity(0)) // plan.ranks_here)


def with_threads(plan: EnginePlan, environment: Mapping[str, str]) -> EnginePlan:
    """The plan with ``threads`` as ``OMP_NUM_THREADS`` says where it is not set, and with notes: what was followed or
    was not, and whether there are cores for all threads."""
    threads, note = _threads(plan.settings.threads, environment)
    plan = replace(plan, settings=replace(plan.settings, threads=threads))
    here = plan.launcher is None
    crowded = _crowded(plan) if plan.device.kind == "cpu" and here else ""
    return replace(plan, notes=(*plan.notes, *filter(None, (note, crowded))))


def _threads(threads: int | None, environment: Mapping[str, str]) -> tuple[int | None, str]:
    given = environment.get(VARIABLE, "").strip()
    said = given.partition(",")[0]  # more numbers are of nested loops, which there are none of
    if not given or said == str(threads):
        return threads, ""
    if threads is not None:
        return threads, f"{VARIABLE}={given} is not followed: threads={threads} says otherwise"
    if not said.isdecimal() or int(said) < 1:
        return None, f"{VARIABLE}={given} is not followed: expected a whole number from 1"
    if said == "1" and TORCHRUN in environment:
        return None, f"{VARIABLE}=1 is not followed: torchrun sets it where nobody has; threads=1 does the same"
    return int(said), f"threads={said}, as {VARIABLE} says; threads=N takes another number"


def _crowded(plan: EnginePlan) -> str:
    ranks, threads, cores = plan.ranks_here, cores_of(plan), len(os.sched_getaffinity(0))
    if ranks * threads <= cores:
        return ""
    more = f"{ranks} ranks with threads={threads} each" if ranks > 1 else f"threads={threads}"
    fits = f"threads={cores // ranks}" if ranks <= cores else f"{cores} rank{'s' * (cores > 1)} on a machine"
    return (
        f"{more} on {cores} core{'s' * (cores > 1)}: threads wait for cores, and all for the last; at most {fits} "
        "would not"
    )
