"""What a quantizer packs is tried before it is used, and only as it will be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contracts.ops import LinearPart, LinearSpec
from engine.kernels.checks.linear import LinearCheck
from engine.testing.context import build_context
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.unquantized import Unquantized
from tests.needs import needs_compiler


@needs_compiler
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu", "relu2"])
def test_gates_of_other_activations_than_a_layer_has_are_not_asked_for(act: str) -> None:
    spec = LinearSpec((LinearPart("gate", 32), LinearPart("up", 32)), 16, "out", "gate_up")
    quantizer = Unquantized(UnquantizedConfig(), replace(build_context(), execution="compile"))
    parts = [{"weight": torch.randn(32, 16)} for _ in spec.parts]
    packed = quantizer.pack(spec, parts, torch.float32, "cpu")
    assert packed.native is not None
    LinearCheck(quantizer, torch.float32, "cpu")(spec, parts, packed, act)
