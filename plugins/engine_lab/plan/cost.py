"""What a step takes on a device: estimated from what it reads and multiplies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.contracts.step_cost import DraftCost, StepCost, StepWork
from engine_lab.plan.figure import Origin
from engine_lab.shared.estimates.collectives import collectives
from engine_lab.shared.estimates.devices import Device
from engine_lab.shared.estimates.efficiency import Efficiency
from engine_lab.shared.estimates.steps import Estimate
from engine_lab.shared.simulation.calibration import read_calibration
from engine_lab.shared.simulation.spec import Overheads
from engine_lab.shared.sizing import Sizing

METHOD = "NCCL"
SHORT, LONG = 64, 2048
"""Tokens of the steps that the line is drawn through."""

NONE = Overheads()


@dataclass(frozen=True, slots=True)
class Cost:
    """And where it is from."""

    step: StepCost
    origin: Origin
    source: str
    overheads: Overheads = NONE
    """Of the API process; estimates leave them out."""
    drafts: DraftCost | None = None
    """``None``: drafts are left out."""


def saved(file: Path) -> Cost:
    """As measured of an engine. Raises :class:`~engine_lab.shared.simulation.calibration.CalibrationError`."""
    found = read_calibration(file)
    return Cost(found.step_cost, "measured", f"{file.name}: {found.measured_on}", found.overheads or NONE, found.drafts)


def estimated(sizing: Sizing, device: Device, efficiency: Efficiency) -> Cost:
    """By :class:`~engine_lab.shared.estimates.steps.Estimate`, as a line through short and long steps. Raises
    :class:`~engine_lab.shared.estimates.errors.EstimateError` for layouts that it does not know."""
    found = estimate_of(sizing, device, efficiency)
    near, far = found.decode(1, SHORT).ms, found.decode(1, LONG).ms
    decode_context = (far - near) / (LONG - SHORT)
    base = near - SHORT * decode_context
    whole, after = found.prefill(LONG).ms, found.prefill(LONG, LONG).ms
    prefill_context = (after - whole) / (LONG * LONG)
    step = StepCost(
        base_ms=base,
        per_token_ms=0.0,
        num_samples=1,
        mixtures=sizing.mixtures,
        per_decode_context_ms=decode_context,
        per_prefill_context_ms=prefill_context,
    )
    step = replace(step, per_token_ms=max(0.0, whole - step.ms(StepWork.chunk(LONG))) / LONG)
    return Cost(step, "estimated", f"{device.source}; {efficiency.source}")


def estimate_of(sizing: Sizing, device: Device, efficiency: Efficiency) -> Estimate:
    """With the weights and caches of the plan as large as the allocator says."""
    plan = sizing.plan
    return Estimate(
        sizing.graph,
        plan.layout,
        device,
        collectives(METHOD, device.link),
        efficiency,
        widths=sizing.widths,
        units=sizing.units,
    )
