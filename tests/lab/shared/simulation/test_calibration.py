"""Calibrations as files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.contracts.step_cost import DraftCost, StepCost
from engine.loop.draft_cost import DraftSample
from engine.loop.step_cost import StepCostModel
from engine.startup.calibration import CalibrationFile
from engine_lab.shared.simulation.calibration import (
    SCHEMA,
    Calibration,
    CalibrationError,
    read_calibration,
    write_calibration,
)
from engine_lab.shared.simulation.spec import Overheads


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    calibration = Calibration(
        SCHEMA,
        StepCost(1.0, 0.5, 9, gap_ms=0.25),
        Overheads(1.0, 2.0, 3.0),
        100,
        DraftCost(0.1, 0.2, 0.3, 0.4, 9, 0.5, (0.6, 0.7)),
        "here",
    )
    write_calibration(tmp_path / "c", calibration)
    assert read_calibration(tmp_path / "c") == calibration


def test_what_an_engine_keeps_is_a_calibration(tmp_path: Path) -> None:
    model = StepCostModel()
    model.observe_drafts(DraftSample(2.0, 8, (3,), 1, 1, (1, 1), (1,)))
    state = model.state()
    (tmp_path / "c").write_bytes(msgspec.json.encode(CalibrationFile(1, "key", state)))
    found = read_calibration(tmp_path / "c")
    assert (found.step_cost, found.drafts) == (state.cost, state.drafts)
    assert found.drafts is not None and found.drafts.acceptance == (1.0, 0.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": {}}', '{"schema": "x", "step_cost": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(CalibrationError, match="no calibration"):
        read_calibration(tmp_path / "c")
