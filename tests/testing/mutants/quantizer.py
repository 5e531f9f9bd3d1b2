"""Quantizers with a bug each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import (
    UNQUANTIZED,
    CustomWeight,
    PlainWeight,
    QuantizedWeight,
    StoredTensor,
    Weight,
    WeightFormat,
)
from engine.testing.quantizer import QuantizerConformance
from tests.testing.mutants.mutant import OnPlugin, correct, mutant

PRODUCT = "test_kernels_multiply_by_the_weight_for_any_number_of_rows"
WEIGHTS = "test_a_weight_is_the_checkpoints"
FORMAT = "test_a_weight_is_data_of_the_format_that_was_said"
CUTS = "test_cuts_for_tensor_parallelism_are_cuts_of_the_layer"
BYTES = "test_the_bytes_that_follow_from_its_format_are_those_that_are_kept"
BIASES = "test_a_bias_is_added_to_its_own_part_only"
STORED = "test_the_checkpoint_may_be_in_another_dtype_and_stays_as_it_is"
GROUP = 32
Parts = Sequence[Mapping[str, Tensor]]


class Plain:
    """Weights in the compute dtype: a correct quantizer."""

    lossless = True

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return UNQUANTIZED

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return None

    def weight(self, parts: Parts) -> Tensor:
        return torch.cat([part["weight"] for part in parts]) if len(parts) > 1 else parts[0]["weight"]

    def bias(self, parts: Parts) -> Tensor | None:
        if not any("bias" in part for part in parts):
            return None
        return torch.cat([part.get("bias", torch.zeros(len(part["weight"]))).float() for part in parts])

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> Weight:
        return PlainWeight(self.weight(parts), self.bias(parts))


class PlainSuite(OnPlugin, QuantizerConformance):
    rows = (1, 3, 17)

    def make(self) -> Any:
        return self.plugin()


class Grouped:
    """Checkpoints of int8 ``codes`` with float32 ``scales`` for every 32 inputs: a correct quantizer."""

    lossless = True

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        axes = {"out": 0, "in": 1}
        bias = StoredTensor("bias", {"out": 0}, optional=True)
        return (StoredTensor("codes", axes), StoredTensor("scales", axes, {"in": GROUP}), bias)

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return WeightFormat(8, GROUP)

    def scales(self, parts: Parts) -> Tensor:
        return torch.cat([part["scales"] for part in parts])

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> Weight:
        codes = torch.cat([part["codes"] for part in parts])
        bias = torch.cat([part.get("bias", torch.zeros(len(part["codes"]))).float() for part in parts])
        return QuantizedWeight(codes, self.scales(parts), GROUP, bias=bias)


class GroupedSuite(OnPlugin, QuantizerConformance):
    rows = (1, 17)

    def make(self) -> Any:
        return self.plugin()

    def parts(self, spec: LinearSpec, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        made = []
        for tensors in super().parts(spec, dtype):
            weight = tensors.pop("weight").float()
            scales = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 127
            codes = (weight / scales.repeat_interleave(GROUP, dim=1)).round().to(torch.int8)
            made.append({"codes": codes, "scales": scales} | tensors)
        return made

    def weights(self, parts: Parts) -> list[Tensor]:
        return [part["codes"].float() * part["scales"].repeat_interleave(GROUP, dim=1) for part in parts]


class Halves(Plain):
    """Weights in float16, in a format of their own: a correct quantizer."""

    lossless = False

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return WeightFormat(16, spec.in_features, scale_bytes=0, custom=True)

    def dense(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float()

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> Weight:
        tensors = {"weight": self.weight(parts).half()}
        return CustomWeight(tensors, spec.out_features, spec.in_features, self.dense, bias=self.bias(parts))


class HalvesSuite(PlainSuite):
    weight_error = 2.0**-10


correct(PlainSuite, Plain)
correct(GroupedSuite, Grouped)
correct(HalvesSuite, Halves)


@mutant(PlainSuite, CUTS, raises=RuntimeError)
class SwappedAxes(Plain):
    """Says that the weight's first axis is the input's."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", {"out": 1, "in": 0}), StoredTensor("bias", {"out": 0}, optional=True))


@mutant(PlainSuite, CUTS, raises=RuntimeError)
class WholeBias(Plain):
    """Keeps the whole bias on every rank."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        weight, bias = super().stored(spec)
        return (weight, replace(bias, shard_axes={}, replicated=("out",)))


@mutant(PlainSuite, CUTS)
class CutsWithoutAReason(Plain):
    """Does not say how its weight is cut, nor why it cannot be."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        weight, bias = super().stored(spec)
        return (replace(weight, shard_axes={}), bias)


@mutant(GroupedSuite, CUTS, raises=ValueError)
class ScalesStayWhole(Grouped):
    """Says that every rank keeps all scales when inputs are cut."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        codes, scales, bias = super().stored(spec)
        return (codes, replace(scales, shard_axes={"out": 0}, replicated=("in",)), bias)


@mutant(GroupedSuite, CUTS, raises=RuntimeError)
class ScalesOfOneInput(Grouped):
    """Does not say that an entry of its scales is of a group of inputs."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        codes, scales, bias = super().stored(spec)
        return (codes, replace(scales, per_entry={}), bias)


@mutant(GroupedSuite, CUTS)
class FirstScales(Grouped):
    """Packs every cut with the scales of the first inputs."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        codes, scales, bias = super().stored(spec)
        return (codes, replace(scales, shard_axes={"out": 0}, replicated=("in",)), bias)

    def scales(self, parts: Parts) -> Tensor:
        return super().scales(parts)[:, : parts[0]["codes"].shape[1] // GROUP].contiguous()


@mutant(GroupedSuite, FORMAT)
class HalfTheBits(Grouped):
    """Says that codes take half the bits that they have."""

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return WeightFormat(4, GROUP)


@mutant(GroupedSuite, FORMAT, BYTES)
class ForgetsScales(Grouped):
    """Says that a row has one scale."""

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return WeightFormat(8, spec.in_features)


@mutant(GroupedSuite, FORMAT)
class ForgetsTheFormat(Grouped):
    """Says that weights are plain."""

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        return None


@mutant(HalvesSuite, BYTES)
class KeepsTwoCopies(Halves):
    """Keeps the weight a second time, transposed, and does not say so."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> Weight:
        made = super().pack(spec, parts, dtype, device)
        assert isinstance(made, CustomWeight)
        return replace(made, tensors={**made.tensors, "turned": made.tensors["weight"].T.contiguous()})


@mutant(HalvesSuite, FORMAT)
class Turned(Halves):
    """Hands over a transposed view."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> Weight:
        made = super().pack(spec, parts, dtype, device)
        assert isinstance(made, CustomWeight)
        return replace(made, tensors={"weight": made.tensors["weight"].T.contiguous().T})


@mutant(HalvesSuite, PRODUCT, raises=RuntimeError)
class AColumnShort(Halves):
    """Unpacks all inputs but the last."""

    def dense(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return super().dense(tensors)[:, :-1]


@mutant(HalvesSuite, PRODUCT, raises=RuntimeError)
class SixteenBitWeights(Halves):
    """Unpacks to float16."""

    def dense(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"]


@mutant(PlainSuite, FORMAT)
class ARowShort(Plain):
    """Packs all outputs but the last."""

    def weight(self, parts: Parts) -> Tensor:
        return super().weight(parts)[:-1]


@mutant(PlainSuite, BIASES)
class BiasesInReverse(Plain):
    """Joins the biases of the parts in another order than their weights."""

    def bias(self, parts: Parts) -> Tensor | None:
        found = [part["bias"].float() for part in reversed(parts) if "bias" in part]
        if not found:
            return None
        joined = torch.cat(found)
        return F.pad(joined, (0, sum(len(part["weight"]) for part in parts) - len(joined))) + 0.0


@mutant(PlainSuite, BIASES, CUTS)
class ForgetsTheBias(Plain):
    """Drops the bias."""

    def bias(self, parts: Parts) -> Tensor | None:
        return None


@mutant(PlainSuite, WEIGHTS)
class OneScaleForAllParts(Plain):
    """Rounds q, k and v to 8 bits with one scale, though one of them is much larger."""

    def weight(self, parts: Parts) -> Tensor:
        weight = super().weight(parts).float()
        scale = weight.abs().max() / 127
        return (weight / scale).round() * scale


@mutant(PlainSuite, STORED)
class RoundsTheCheckpoint(Plain):
    """Clamps the checkpoint's own tensors, of which one may be the embedding."""

    def weight(self, parts: Parts) -> Tensor:
        for part in parts:
            part["weight"].clamp_(-0.05, 0.05)
        return super().weight(parts)


@mutant(PlainSuite, "test_a_tied_head_stays_shared_if_it_stays_plain")
class CopiesTheTied(Plain):
    """Copies a tied head's weight, which is the embedding's."""

    def weight(self, parts: Parts) -> Tensor:
        return super().weight(parts).clone()


@mutant(PlainSuite, "test_declares_what_the_core_plans_with")
class SaysNothingOfLoss(Plain):
    """States ``lossless`` as a word."""

    lossless: Any = "no"


@mutant(PlainSuite, "test_it_says_what_it_stores")
class StoresMore(Plain):
    """Asks for a tensor that no checkpoint of its format has."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return (*super().stored(spec), StoredTensor("scale"))
