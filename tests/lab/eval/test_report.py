"""The verdict: what is outside a tolerance, and what was never measured."""

import math

import pytest

from engine_lab.eval.options import Limits
from engine_lab.eval.report import Report, Row, failures


def report(limits, **figures):
    return Report("model", "text", {}, 1, 1, 0.9, (Row("plan", (), {}, "float32", **figures),), limits)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.2])
def test_what_is_not_below_a_tolerance_is_outside(value):
    assert failures(report(Limits(kl=0.1), kl=value))
    assert failures(report(Limits(perplexity_increase=0.1), perplexity_increase=value))


def test_a_tolerance_on_what_was_not_measured_is_not_met():
    assert failures(report(Limits(kl=0.1))) == ["plan: KL was not measured, wanted at most 0.1"]


def test_the_tolerance_itself_is_within():
    assert not failures(report(Limits(kl=0.1, agreement=0.5), kl=0.1, agreement=0.5))
