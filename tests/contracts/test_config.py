"""Settings are imported from one place, and a value that makes no sense is refused by its key."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine.contracts import config

FILES = sorted(file.stem for file in Path(config.__file__).parent.glob("*.py") if file.stem != "__init__")


def test_whatever_a_file_defines_is_imported_from_the_package() -> None:
    for name in FILES:
        module = import_module(f"engine.contracts.config.{name}")
        own = {key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert {key for key in own if not key.startswith("_")} <= {*config.__all__}, name
    assert all(hasattr(config, name) for name in config.__all__)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: config.BatchSettings(path="here"), "batches.path=here: expected auto, none or an absolute path"),
        (lambda: config.ServerSettings(store_path="here"), "server.store_path=here: expected none or an absolute path"),
        (lambda: config.FleetSettings(replicas=65), "fleet.replicas=65: expected 1 to 64"),
        (lambda: config.GatewaySettings(patience_s=61.0), "gateway.patience_s=61.0: expected 0.0 to 60.0"),
        (lambda: config.ParallelismConfig(tp=0), "parallelism.tp=0: expected at least 1"),
        (lambda: config.ServerSettings(drain_s=math.inf), "server.drain_s=inf: expected a finite number"),
        (lambda: config.SloSettings(late_s=math.nan), "slo.late_s=nan: expected at least 0"),
        (lambda: config.SchedulerConfig(max_requests=0), "scheduler.max_requests=0: expected at least 1"),
        (lambda: config.Settings(device="tpu"), "device=tpu: expected one of auto, cpu, cuda"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == says
