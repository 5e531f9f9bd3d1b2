"""Tensor parallelism cuts what is stored; each cut is then read alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.plugins.quantizer.checkpoint.writers import CASES

from engine.contracts.ops import LinearPart, LinearSpec, Range, Share
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine.models.sharding import smallest_cut, taken
from engine.testing.quantizer import shares
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
    """Ranks share out the layer's outputs instead."""
    assert smallest_cut(_Layout(name), SPEC, "in") is None
    assert smallest_cut(_Layout(name), SPEC, "out") == 8


@pytest.mark.parametrize(
    ("name", "out", "inputs"),
    [("ct w4 g32 asym", 8, 32), ("gptq w4 g32 asym", 8, 32), ("awq g32", 8, 32), ("awq one group", 8, 1),
     ("ct fp8 block", 1, 16), ("ct fp8 channel", 1, 1), ("gptq w8 g32 asym", 4, 32)],
)  # fmt: skip
def test_no_cut_goes_through_a_word_or_a_group(name: str, out: int, inputs: int) -> None:
    """Blocks of FP8 may be cut along the output: each rank reads the scales of all blocks that it has a part of."""
    layout = _Layout(name)
    assert (smallest_cut(layout, SPEC, "out"), smallest_cut(layout, SPEC, "in")) == (out, inputs)


@pytest.mark.parametrize("ranges", [((0, 40),), ((40, 64),), ((5, 6), (31, 33), (34, 64)), ((0, 32), (32, 64))])
@pytest.mark.parametrize("name", ["ct fp8 block", "fp8 block"])
def test_rows_are_read_with_the_scales_of_their_blocks(name: str, ranges: tuple[Range, ...]) -> None:
    """Wherever the cuts lie: several values of one tensor are several ranges of it."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    scheme, (tensors, dense) = recipe_of(CASES[name].quantization).scheme_of("p", False), CASES[name].write(weight)
    assert scheme is not None
    layout = LAYOUTS[scheme.layout]
    own = replace(SPEC, share=Share(SPEC, (ranges,)))
    stored = [rule.stored for rule in layout.rules(scheme, SPEC.parts[0], SPEC) if rule.stored.suffix in tensors]
    mine = {one.suffix: taken(tensors[one.suffix], one, own, 0) for one in stored}
    found = layout.read(scheme, "p", mine, 128, ranges)
    assert torch.equal(found.dense(), torch.cat([dense[start:stop] for start, stop in ranges]))


def test_values_of_one_tensor_that_share_a_word_cannot_be_cut_apart() -> None:
    layout = _Layout("awq g32")
    spec = LinearSpec((LinearPart("p", 64, slices=(24, 20, 20)),), 128)
    assert smallest_cut(layout, spec, "out") is None
    assert smallest_cut(layout, LinearSpec((LinearPart("p", 64, slices=(24, 24, 16)),), 128), "out") == 8


SPEC = LinearSpec((LinearPart("p", 64),), 128)


class _Layout:
    """A quantizer of one format, as far as it says what is stored."""

    lossless = False

    def __init__(self, name: str) -> None:
        self.scheme = recipe_of(CASES[name].quantization).scheme_of("p", False)

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        assert self.scheme is not None
        return [rule.stored for rule in LAYOUTS[self.scheme.layout].rules(self.scheme, spec.parts[0], spec)]

    def pack(self, *arguments: Any) -> QuantizedWeight:
        raise NotImplementedError


def _whole_and_halves(name: str, axis: Any) -> tuple[QuantizedWeight, list[QuantizedWeight]]:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    tensors, _ = CASES[name].write(weight)
    spec = LinearSpec((LinearPart("p", 64),), 128, shard=axis)
    scheme = recipe_of(CASES[name].quantization).scheme_of("p", False)
    assert scheme is not None
    layout = LAYOUTS[scheme.layout]
    stored = [rule.stored for rule in layout.rules(scheme, spec.parts[0], spec) if rule.stored.suffix in tensors]
    halves = []
    for own in shares(spec):
        assert own.share is not None
        half = {one.suffix: taken(tensors[one.suffix], one, own, 0) for one in stored}
        halves.append(layout.read(scheme, "p", half, 128, own.share.rows[0] if axis == "out" else None))
    return layout.read(scheme, "p", tensors, 128), halves
