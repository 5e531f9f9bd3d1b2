"""When a target's first byte is expected."""

from __future__ import annotations

import random

import pytest

from engine.service.first_byte import FEWEST, STALE_S, FirstByteModel


def learned(base_ms: float, ms_per_token: float, count: int = 40, noise: float = 0.0) -> FirstByteModel:
    model, rng = FirstByteModel(), random.Random(0)
    for _ in range(count):
        tokens = rng.randrange(1, 4000)
        model.add(tokens, (base_ms + ms_per_token * tokens) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_few_measurements_predict_nothing() -> None:
    model = learned(10.0, 0.5, FEWEST - 1)
    assert model.ms(100) is None
    model.add(100, 60.0)
    assert model.ms(100) is not None


def test_the_line_through_the_measurements_is_found() -> None:
    assert learned(10.0, 0.5).ms(2000) == pytest.approx(1010.0)
    assert learned(10.0, 0.5, noise=0.1).ms(2000) == pytest.approx(1010.0, rel=0.1)


def test_equal_prompts_predict_what_they_took() -> None:
    model = FirstByteModel()
    for _ in range(FEWEST):
        model.add(64, 20.0)
    assert model.ms(64) == model.ms(4000) == pytest.approx(20.0)


def test_more_tokens_are_never_expected_sooner() -> None:
    model = FirstByteModel()
    for tokens in range(1, 20):
        model.add(tokens, 100.0 - tokens)
    few, many = model.ms(1), model.ms(100)
    assert few is not None and few == many


def test_a_quick_measurement_after_a_pause_makes_it_begin_anew() -> None:
    now_s = 0.0
    model = FirstByteModel(clock=lambda: now_s)
    for ms in (*[1000.0] * FEWEST, 100.0):
        model.add(64, ms)
    assert (model.ms(64) or 0.0) > 800.0, "without a pause it is one of many"
    now_s = STALE_S + 1.0
    assert model.is_stale
    model.add(64, 900.0)
    assert not model.is_stale and (model.ms(64) or 0.0) > 800.0, "as expected"
    now_s *= 2
    model.add(64, 100.0)
    assert model.ms(64) is None
    for _ in range(FEWEST):
        model.add(64, 100.0)
    assert model.ms(64) == pytest.approx(100.0)


def test_what_was_long_ago_fades() -> None:
    model = learned(10.0, 0.5)
    for _ in range(400):
        model.add(1000, 50.0)
    assert model.ms(1000) == pytest.approx(50.0, rel=0.05)
