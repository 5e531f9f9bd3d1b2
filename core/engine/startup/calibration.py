"""Fitted step costs on disk, so that the first steps of the next start are predicted, too.

A file is for one checkpoint, one engine version, the plugins and settings that steps depend on, and one device. What
cannot be used is ignored, and a warning says why: nothing here fails a start.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec

from engine.assembly.plan import EnginePlan
from engine.contracts.step_cost import Mixture
from engine.loop.step_cost import StepCostState, usable
from engine.native.folder import open_own, unusable, user_folder
from engine.native.scratch import replacing
from engine.startup.fingerprint import checkpoint_hash

FORMAT = 3
MOST_BYTES = 1 << 16
LEAST_SAMPLES = 200
"""Steps measured in a run for its fit to be kept."""
NOT_TIMED = ("scheduler", "constraint", "router", "exporter", "kv_store")
"""Slots whose plugins do not change how long the same work takes."""


class CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    key: str
    """See :func:`calibration_key`."""
    state: StepCostState


class Calibration:
    """The file of one engine."""

    def __init__(self, file: Path, key: str, mixtures: tuple[Mixture, ...]) -> None:
        self._file = file
        self._key = key
        self._mixtures = mixtures
        self._kept = 0
        """Samples after what is in the file, as far as this process knows."""

    def load(self) -> StepCostState | None:
        """``None``: there is none that can be used."""
        try:
            with open_own(self._file) as opened:
                found = msgspec.json.decode(opened.read(MOST_BYTES), type=CalibrationFile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            self._ignored(str(error))
            return None
        if (found.format, found.key) != (FORMAT, self._key):
            self._ignored(f"format {found.format}, key {found.key}; expected format {FORMAT}, key {self._key}")
            return None
        reason = usable(found.state, self._mixtures)
        if reason is not None:
            self._ignored(reason)
            return None
        self._kept = found.state.cost.num_samples
        return found.state

    def keep(self, state: StepCostState) -> None:
        """Replace the file, as a whole, if enough was measured since the last time."""
        if state.cost.num_samples - self._kept < LEAST_SAMPLES:
            return
        self._kept = state.cost.num_samples
        try:
            with replacing(self._file) as new:
                new.write(msgspec.json.encode(CalibrationFile(FORMAT, self._key, state)))
        except OSError as error:
            warnings.warn(f"measured step costs are not kept: {error}", stacklevel=2)

    def _ignored(self, reason: str) -> None:
        warnings.warn(f"kept step costs are ignored and measured again: {self._file}: {reason}", stacklevel=3)


def calibration(plan: EnginePlan, mixtures: tuple[Mixture, ...]) -> Calibration | None:
    """Of an engine; ``None``, where others could write to the folder with a warning, if nothing is kept."""
    where = plan.settings.calibration
    if where == "none":
        return None
    folder = user_folder("step_cost") if where == "auto" else Path(where)
    reason = unusable(folder)
    if reason is not None:
        warnings.warn(f"step costs are measured anew at every start: {reason}; or set calibration=none", stacklevel=2)
        return None
    key, name = calibration_key(plan), re.sub(r"[^\w.-]", "_", plan.model.name)[-60:].lstrip(".")
    return Calibration(folder / f"{name}-{key}.json", key, mixtures)


def calibration_key(plan: EnginePlan) -> str:
    """Of all that the time of a step depends on beside its work."""
    chosen: dict[str, Any] = {
        slot: [(choice.name, choice.origin, choice.config) for choice in choices]
        for slot, choices in plan.slots.items()
        if slot not in NOT_TIMED
    }
    device, settings = plan.device, plan.settings
    parts = (
        *(plan.engine_version, checkpoint_hash(plan.model.path) or plan.model.path, plan.dtype, plan.execution),
        *(settings.threads, device.kind, device.name, device.count, sorted(device.features), chosen),
    )
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]
