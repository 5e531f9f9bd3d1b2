"""How sure a model is, and from where on that is enough."""

from __future__ import annotations

import pytest

from engine.service.confidence import Calibration, confidence


def test_a_quantile_does_not_depend_on_how_many_tokens_there_are() -> None:
    some = [-0.1] * 9 + [-2.0]
    assert confidence(some, 0.2) == confidence(some * 3, 0.2) == -0.1
    assert confidence(some, 0.0) == confidence(some * 3, 0.05) == -2.0
    assert confidence([-1.0], 0.5) == -1.0


@pytest.mark.parametrize(("least", "expected"), [(0.0, -5.0), (0.5, -2.0), (0.7, -2.0), (0.9, -0.1), (0.91, None)])
def test_the_threshold_is_the_lowest_from_which_on_enough_agree(least: float, expected: float | None) -> None:
    table = Calibration("small", "large", 10, 8, 0.1, ((-5.0, 0.1), (-2.0, 0.7), (-0.1, 0.9)))
    assert table.threshold(least) == expected
