"""What tests of several ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.architecture.family import FOLDERS, WRITTEN, Family
from tests.ranks.machines import Machines
from tests.ranks.processes import pss_mib


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[Callable[[type[Family], str], Any]]:
    with FOLDERS:
        yield lambda family, name: family().checkpoint(name)
    WRITTEN.clear()


NAMED_AS_LIBRARIES = ("torch", "ray", "json", "msgspec", "argparse", "engine_plugins")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder holds files named as libraries, which must not be run."""
    folder, marker = tmp_path / "current", tmp_path / "was run"
    folder.mkdir()
    for name in NAMED_AS_LIBRARIES:
        (folder / f"{name}.py").write_text(
            f"import sys; open({str(marker)!r}, 'a').write(f'{{__name__}} {{sys.argv}}')"
        )
    monkeypatch.chdir(folder)
    yield
    assert not marker.exists(), marker.read_text()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        began = time.monotonic()
        found = Machines()
        found.second = found.add()  # type: ignore[attr-defined]
        print(f"two Ray nodes: {time.monotonic() - began:.1f} s, {pss_mib(found.own()):.0f} MiB")
        yield found
        found.close()
