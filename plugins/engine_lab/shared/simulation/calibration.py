"""What was measured of an engine and is needed to simulate it, as a JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.contracts.step_cost import DraftCost, StepCost
from engine.loop.step_errors import StepCostReport
from engine_lab.shared.simulation.spec import Overheads

SCHEMA = "engine-simulation/1"


class CalibrationError(ValueError):
    """A calibration cannot be used: which file, and why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    schema: str
    step_cost: StepCost
    overheads: Overheads | None = None
    """``None``: not known."""
    num_blocks: int | None = None
    """KV blocks that the engine had."""
    drafts: DraftCost | None = None
    """``None``: nothing was drafted."""
    measured_on: str = ""
    """Model and device, in words."""


class _Kept(msgspec.Struct):
    """Step costs that an engine keeps for its next start (setting ``calibration``)."""

    key: str
    state: StepCostReport


def read_calibration(path: Path) -> Calibration:
    """A file of :func:`write_calibration`, or one that an engine has kept: nothing is known of overheads then. Raises
    :class:`CalibrationError`."""
    try:
        data = path.read_bytes()
        if "state" in msgspec.json.decode(data, type=dict[str, msgspec.Raw]):
            kept = msgspec.json.decode(data, type=_Kept)
            return Calibration(
                SCHEMA, kept.state.cost, drafts=kept.state.drafts, measured_on=kept.state.told_with(kept.key)
            )
        found = msgspec.json.decode(data, type=Calibration)
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CalibrationError(f"{path}: no calibration ({error})") from error
    if found.schema != SCHEMA:
        raise CalibrationError(f"{path}: schema {found.schema!r}, expected {SCHEMA!r}")
    return found


def write_calibration(path: Path, calibration: Calibration) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
