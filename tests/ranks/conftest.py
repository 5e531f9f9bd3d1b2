"""What tests of several ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.plugins.architecture.family import FOLDERS, WRITTEN, Family


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[Callable[[type[Family], str], Any]]:
    with FOLDERS:
        yield lambda family, name: family().checkpoint(name)
    WRITTEN.clear()
