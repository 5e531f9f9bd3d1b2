"""What a quantizer cannot do is refused."""

from __future__ import annotations

import pytest

from engine_plugins.quantizer.config import FP8Config, Int8Config, UnquantizedConfig


def test_activations_a_quantizer_cannot_do_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quantizer\.activations=int8"):
        UnquantizedConfig(activations="int8")
    with pytest.raises(ValueError, match=r"quantizer\.activations=fp8"):
        Int8Config(activations="fp8")
    with pytest.raises(ValueError, match=r"quantizer\.activations=int8"):
        FP8Config(activations="int8")
