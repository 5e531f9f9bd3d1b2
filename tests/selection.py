"""Which cases of a test the default run has.

``@few(3)`` leaves a test three of its parametrized cases, spread over all of them; the others are ``slow``, as is what
is marked so. Under Triton's interpreter every other test has :data:`INTERPRETED`. ``tools/test_all`` runs everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

INTERPRETED = 1
"""Cases of a test whose kernels are interpreted, which takes a hundred times as long as computing does."""


def few(count: int) -> pytest.MarkDecorator:
    """The default run has so many cases of a test (of each file, where several inherit it)."""
    return pytest.mark.few.with_args(count)


def leave_few(items: Sequence[pytest.Item]) -> None:
    """Mark the other cases as slow."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("few")
        count = mark.args[0] if mark else INTERPRETED if "TRITON_INTERPRET" in os.environ else 0
        if count and item.get_closest_marker("slow") is None:
            cases.setdefault((item.nodeid.partition("[")[0], count), []).append(item)
    for (_, count), found in cases.items():
        kept = {(2 * i + 1) * len(found) // (2 * count) for i in range(min(count, len(found)))}
        for place, item in enumerate(found):
            if place not in kept and len(found) > count:
                item.add_marker("slow")
