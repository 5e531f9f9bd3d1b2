"""A quantizer's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import CustomWeight, PlainWeight, QuantizedWeight, Quantizer, Weight
from engine.kernels.checks.tensors import random, tensor_problem, value_problem
from engine.kernels.linear import PackedLinear
from engine.plugin_guard.calls import PluginError, contract_error, name_of, noting, quote

if TYPE_CHECKING:
    from engine.kernels.packing import Target

TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Accepted error of a product: wrong weights are off by more, rounding by less."""
MOST_COMPARED = 2**25
"""Weights of a layer up to which products are compared with their definition, which may unpack all of them."""


def checked_weight(quantizer: Quantizer, spec: LinearSpec, made: object) -> Weight:
    """``made``: what a quantizer packed of ``spec``."""
    if not isinstance(made, PlainWeight | QuantizedWeight | CustomWeight):
        expected = "a PlainWeight, a QuantizedWeight or a CustomWeight: the core's kernels multiply by it"
        raise contract_error(quantizer, "pack", f"returned {quote(made)}, expected {expected}")
    found, expected_size = [made.out_features, made.in_features], [spec.out_features, spec.in_features]
    if found != expected_size:
        raise contract_error(quantizer, "pack", f"returned a weight {found}, expected {expected_size}")
    return _named(made, name_of(quantizer)) if isinstance(made, CustomWeight) else made


def _named(weight: CustomWeight, who: str) -> CustomWeight:
    """The weight; what its functions raise says whose they are."""
    load, unpack = weight.tile_loader, noting(weight.dense, f"{who}: dense()")
    shape = [weight.out_features, weight.in_features]

    def dense(tensors: Mapping[str, Tensor]) -> Tensor:
        found: object = unpack(tensors)
        if not isinstance(found, Tensor):
            raise PluginError(f"{who}: dense() returned {quote(found)}, expected float32 {shape}")
        if found.dtype != torch.float32 or [*found.shape] != shape:
            dtype = str(found.dtype).removeprefix("torch.")
            raise PluginError(f"{who}: dense() returned {dtype} {[*found.shape]}, expected float32 {shape}")
        return found

    return replace(
        weight,
        dense=dense,
        tile_loader=None if load is None else noting(load, f"{who}: tile_loader()"),
    )


class LinearCheck:
    """Looks at one product of the first two layers of every kind: those of one kind have the same shape and label."""

    def __init__(self, quantizer: Quantizer, target: Target) -> None:
        self._quantizer = quantizer
        self._dtype = target.dtype
        self._device = torch.device(target.device)
        self._seen: Counter[object] = Counter()

    def __call__(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], packed: PackedLinear) -> None:
        """``packed``: what the kernels made of the quantizer's weight."""
        kind = (spec.kind, spec.in_features, spec.out_features, packed.label)
        self._seen[kind] += 1
        if self._seen[kind] > 2:  # the second must not be the first
            return
        x = random((1, spec.in_features), self._dtype, self._device, 5)
        product = packed.apply(x)
        named = "+".join(part.name for part in spec.parts)
        self._fail(f"of {named} ", tensor_problem(product, (1, spec.out_features), self._dtype, self._device))
        if spec.in_features * spec.out_features > MOST_COMPARED:
            return
        self._fail(f"of {named}: its product ", value_problem(product, packed.reference(x), TOLERANCE[self._dtype]))
        want = self._as_stored(parts, x)
        if want is not None:
            problem = value_problem(product, want, TOLERANCE[self._dtype])
            self._fail("says lossless=True, and its product ", problem and f"{problem} by the checkpoint's weights")

    def _as_stored(self, parts: Sequence[Mapping[str, Tensor]], x: Tensor) -> Tensor | None:
        """The product with the weights as they are stored, where these are plain numbers: that of a lossless
        quantizer."""
        if not self._quantizer.lossless or not all(part.keys() <= {"weight", "bias"} for part in parts):
            return None
        if not all(part["weight"].dtype in TOLERANCE for part in parts):
            return None
        weight = torch.cat([part["weight"] for part in parts]).to(self._device, self._dtype)
        biases = [part.get("bias", part["weight"].new_zeros(len(part["weight"]))) for part in parts]
        return F.linear(x, weight, torch.cat(biases).to(self._device, self._dtype))

    def _fail(self, what: str, problem: str) -> None:
        if problem:
            raise contract_error(self._quantizer, "pack", what + problem)
