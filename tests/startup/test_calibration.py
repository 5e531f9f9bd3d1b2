"""Step costs that are kept for the next start, and files that are not trusted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.step_cost import StepCost, StepWork
from engine.loop.step_cost import StepCostModel
from engine.startup.calibration import LEAST_SAMPLES, Calibration, calibration, calibration_key

COMMON = ["model.path=bundled", "device=cpu", "attention_kernel=torch"]
KEY = "0123456789abcdef"


def measured(steps: int = LEAST_SAMPLES) -> StepCostModel:
    model, truth = StepCostModel(), StepCost(5.0, 0.1, 1, per_decode_context_ms=0.001)
    for i in range(steps):
        work = StepWork.decode(100 + i) + (StepWork.chunk(1 + i % 64) if i % 3 else StepWork())
        model.observe(work, truth.ms(work), 0.1)
    return model


def opened(file: Path, key: str = KEY) -> Calibration:
    return Calibration(file, key, ())


def test_what_was_measured_is_there_at_the_next_start(tmp_path: Path) -> None:
    model, file = measured(), tmp_path / "costs.json"
    opened(file).keep(model.state())
    state = opened(file).load()
    assert state is not None and StepCostModel((), state).cost() == model.state().cost
    assert list(tmp_path.iterdir()) == [file]


def test_few_steps_are_not_worth_keeping(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    opened(file).keep(measured(LEAST_SAMPLES - 1).state())
    assert not file.exists() and opened(file).load() is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{", b""),
        (b'"format":3', b'"format":2'),
        (KEY.encode(), b"another"),
        (b'"base_ms":', b'"base_ms":-'),
        (b'"base_ms":', b'"base_ms":1e999,"was":'),
        (b'"sums":[[', b'"sums":[[1.0,'),
        (b'"best":0', b'"best":7'),
        (b'"mixtures":[]', b'"mixtures":[{"num_experts":8,"top_k":2,"share":0.5}]'),
    ],
)
def test_a_broken_or_foreign_file_is_reported_and_ignored(tmp_path: Path, old: bytes, new: bytes) -> None:
    file = tmp_path / "costs.json"
    opened(file).keep(measured().state())
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))
    with pytest.warns(UserWarning, match="ignored and measured again"):
        assert opened(file).load() is None


def test_a_file_that_others_can_write_to_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    opened(file).keep(measured().state())
    file.chmod(0o666)
    with pytest.warns(UserWarning, match="chmod go-w"):
        assert opened(file).load() is None


def test_a_folder_that_cannot_be_written_to_costs_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not kept"):
        opened(tmp_path / "missing" / "costs.json").keep(measured().state())


def test_costs_are_of_one_model_plan_and_device() -> None:
    plain = calibration_key(assemble(COMMON))
    for same in ("server.port=9999", "scheduler=continuous"):
        assert calibration_key(assemble([*COMMON, same])) == plain
    for other in ("threads=2", "model.dtype=bfloat16", "kv_allocator.block_size=32"):
        assert calibration_key(assemble([*COMMON, other])) != plain


def test_it_can_be_off_and_elsewhere(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        assert calibration(assemble([*COMMON, "calibration=none"]), ()) is None
        kept = calibration(assemble([*COMMON, f"calibration={tmp_path / 'here'}"]), ())
    assert kept is not None
    kept.keep(measured().state())
    assert len(list((tmp_path / "here").iterdir())) == 1
