"""What was measured of an engine and is needed to simulate it, as a JSON file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.contracts.step_cost import StepCost
from engine.simulation.spec import Overheads

SCHEMA = "engine-simulation/1"


class CalibrationError(ValueError):
    """A calibration cannot be used: which file, and why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    schema: str
    step_cost: StepCost
    overheads: Overheads = field(default_factory=Overheads)
    num_blocks: int | None = None
    """KV blocks that the engine had."""
    ms_per_draft: float = 0.0
    """See :class:`~engine.simulation.spec.Drafts`."""
    measured_on: str = ""
    """Model and device, in words."""


def read_calibration(path: Path) -> Calibration:
    """Raises :class:`CalibrationError`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CalibrationError(f"{path}: no calibration ({error})") from error
    if found.schema != SCHEMA:
        raise CalibrationError(f"{path}: schema {found.schema!r}, expected {SCHEMA!r}")
    return found


def write_calibration(path: Path, calibration: Calibration) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
