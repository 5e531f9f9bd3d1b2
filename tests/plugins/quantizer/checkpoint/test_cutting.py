"""Tensor parallelism cuts what is stored; each cut is then read alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.plugins.quantizer.checkpoint.writers import CASES

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.models.sharding import cut
from engine_plugins.quantizer.checkpoint.layouts import LAYOUTS
from engine_plugins.quantizer.checkpoint.methods import recipe_of


@pytest.mark.parametrize(
    ("name", "axis"),
    [("ct w4 g32 asym", "out"), ("ct w4 g32 asym", "in"), ("ct w4 channel", "in"), ("ct w8 g32 asym", "in"),
     ("ct w4 g16 asym actorder", "out"), ("ct fp8 block", "out"), ("ct fp8 block", "in"), ("ct fp8 channel", "out"),
     ("ct fp8 channel", "in"), ("ct fp8 tensor", "in"), ("ct fp8 tensor", "out"), ("awq g32", "out"), ("awq g32", "in"),
     ("awq one group", "in"), ("gptq w4 g32 asym", "in"), ("gptq w4 g32 asym", "out"),
     ("gptq w4 g16 asym desc_act", "out"), ("gptq w4 one group, head", "in"), ("gptq w8 g32 asym", "in")],
)  # fmt: skip
def test_cuts_read_alone_are_cuts_of_the_whole(name: str, axis: Any) -> None:
    """Tensor parallelism cuts what is stored, then reads."""
    whole, halves = _whole_and_halves(name, axis)
    assert torch.equal(torch.cat([half.dense() for half in halves], dim=0 if axis == "out" else 1), whole.dense())


@pytest.mark.parametrize("name", ["ct w4 g16 asym actorder", "gptq w4 g16 asym desc_act"])
def test_inputs_in_activation_order_cannot_be_cut(name: str) -> None:
    with pytest.raises(ValueError, match=r"tp=2: .* cannot be cut along its input axis: .*activation order"):
        _whole_and_halves(name, "in")


def _whole_and_halves(name: str, axis: Any) -> tuple[QuantizedWeight, list[QuantizedWeight]]:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    tensors, _ = CASES[name].write(weight)
    spec = LinearSpec((LinearPart("p", 64),), 128, shard=axis)
    scheme = recipe_of(CASES[name].quantization).scheme_of("p", False)
    assert scheme is not None
    layout = LAYOUTS[scheme.layout]
    stored = [rule.stored for rule in layout.rules(scheme, spec.parts[0], spec) if rule.stored.suffix in tensors]
    halves = [
        {one.suffix: cut(tensors[one.suffix], f"p.{one.suffix}", spec, one, index, 2) for one in stored}
        for index in range(2)
    ]
    return layout.read(scheme, "p", tensors, 128), [layout.read(scheme, "p", half, 128) for half in halves]


@pytest.mark.parametrize("size", [20, 28])
def test_a_cut_through_a_word_of_zero_points_is_refused(size: int) -> None:
    spec = LinearSpec((LinearPart("p", size),), 64, shard="out")
    for name, suffix in (("ct w4 g32 asym", "weight_packed"), ("gptq w4 g32 asym", "qweight")):
        scheme = recipe_of(CASES[name].quantization).scheme_of("p", False)
        assert scheme is not None
        rules = LAYOUTS[scheme.layout].rules(scheme, spec.parts[0], spec)
        (stored,) = [rule.stored for rule in rules if rule.stored.suffix == suffix]
        tensor = torch.zeros(size, 8) if suffix == "weight_packed" else torch.zeros(8, size)
        with pytest.raises(ValueError, match="not a multiple of 2 x 8"):
            cut(tensor, "p", spec, stored, 0, 2)
