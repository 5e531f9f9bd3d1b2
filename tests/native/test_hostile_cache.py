"""What lies in the cache of kernels cannot crash a start, run foreign code, or be left behind.

The attacks are those of ``tools/attack/native_cache.py``, one try of each: every start is a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.needs import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.attack.native_cache import ATTACKS, KERNELS, Attack, carry_out, fill  # noqa: E402

from tests.selection import few  # noqa: E402

POSSIBLE = [each for each in ATTACKS if KERNELS in each.kinds and (os.geteuid() == 0 or not each.needs_root)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("honest"), KERNELS)


@few(3)
@needs_compiler
@pytest.mark.parametrize("attack", POSSIBLE, ids=lambda attack: attack.name)
def test_a_start_withstands(attack: Attack, honest: Path, tmp_path: Path) -> None:
    assert carry_out(attack, KERNELS, honest, tmp_path / "tries", is_short=True) == (1, [])
