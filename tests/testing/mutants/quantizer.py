"""Quantizers with a bug each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import PackedLinear, StoredTensor
from engine.kernels.torch.reference import gated_activation
from engine.testing.quantizer import ADDED, GATED, AddConformance, GateConformance, QuantizerConformance
from tests.testing.mutants.mutant import OnPlugin, correct, mutant

APPLY = "test_apply_equals_the_reference_for_any_number_of_rows"
WEIGHTS = "test_the_reference_multiplies_with_the_checkpoints_weights"
CUTS = "test_cuts_for_tensor_parallelism_are_cuts_of_the_layer"
CALLERS = "test_inputs_are_left_alone_and_results_are_the_callers"
BYTES = "test_the_bytes_it_says_are_those_it_keeps"
GROUP = 32
Parts = Sequence[Mapping[str, Tensor]]
Layer = Callable[[Tensor], Tensor]


class Plain:
    """Weights in the compute dtype, with everything that a layer may offer in plain torch: a correct quantizer."""

    lossless = True

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", {"out": 0, "in": 1}), StoredTensor("bias", {"out": 0}, optional=True))

    def weight(self, parts: Parts) -> Tensor:
        return torch.cat([part["weight"] for part in parts]) if len(parts) > 1 else parts[0]["weight"]

    def bias(self, parts: Parts) -> Tensor | None:
        if not any("bias" in part for part in parts):
            return None
        return torch.cat([part.get("bias", torch.zeros(len(part["weight"]))).float() for part in parts])

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: F.linear(x, weight, bias)

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        weight, bias = self.weight(parts).to(dtype), self.bias(parts)
        bias = None if bias is None else bias.to(dtype)
        plain = F.linear
        apply = self.linear(weight, bias)
        return PackedLinear(
            {"weight": weight} if bias is None else {"weight": weight, "bias": bias},
            reference=lambda x: plain(x, weight, bias),
            apply=apply,
            out_features=spec.out_features,
            apply_add=lambda x, residual: residual + apply(x),
            apply_gated=(lambda x, act: gated_activation(apply(x), act)) if spec.kind == "gate_up" else None,
            label="plain",
        )

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        bias = spec.out_features if any(part.bias for part in spec.parts) else 0
        return (bias + (0 if tied else spec.out_features * spec.in_features)) * int(dtype.itemsize)


class PlainSuite(OnPlugin, AddConformance, GateConformance):
    rows = (1, 3, 17)
    adds, gates = ADDED, GATED

    def make(self) -> Any:
        return self.plugin()


class Grouped:
    """Checkpoints of int8 ``codes`` with float32 ``scales`` for every 32 inputs: a correct quantizer."""

    lossless = True

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        axes = {"out": 0, "in": 1}
        bias = StoredTensor("bias", {"out": 0}, optional=True)
        return (StoredTensor("codes", axes), StoredTensor("scales", axes, {"in": GROUP}), bias)

    def dense(self, part: Mapping[str, Tensor]) -> Tensor:
        return part["codes"].float() * part["scales"].repeat_interleave(GROUP, dim=1)

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        tensors = {name: torch.cat([part[name] for part in parts]) for name in ("codes", "scales")}
        weight = torch.cat([self.dense(part) for part in parts])
        bias = torch.cat([part.get("bias", torch.zeros(len(part["codes"]))).float() for part in parts])

        def linear(x: Tensor) -> Tensor:
            return F.linear(x.float(), weight, bias).to(x.dtype)

        return PackedLinear(tensors | {"bias": bias}, linear, linear, spec.out_features, label="grouped")

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        return spec.out_features * (spec.in_features + spec.in_features // GROUP * 4 + 4)


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
        return [Grouped().dense(part) for part in parts]


correct(PlainSuite, Plain)
correct(GroupedSuite, Grouped)


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


@mutant(GroupedSuite, CUTS, raises=RuntimeError)
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

    def dense(self, part: Mapping[str, Tensor]) -> Tensor:
        groups = part["codes"].shape[1] // GROUP
        return part["codes"].float() * part["scales"][:, :groups].repeat_interleave(GROUP, dim=1)


@mutant(PlainSuite, BYTES)
class HalfTheBytes(Plain):
    """Counts weights as if they took 16 bits in any dtype, and half of them."""

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        return super().packed_bytes(spec, dtype, device, tied) // 2


@mutant(GroupedSuite, BYTES)
class ForgetsScales(Grouped):
    """Counts codes alone, and scales not at all."""

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        return spec.out_features * spec.in_features


@mutant(PlainSuite, "test_a_tied_head_takes_the_bytes_that_it_says")
class CountsTheTied(Plain):
    """Counts a tied head's weight, which is the embedding's, a second time."""

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        return super().packed_bytes(spec, dtype, device, False)


@mutant(PlainSuite, BYTES)
class KeepsTwoCopies(Plain):
    """Keeps the weight a second time, transposed, and does not say so."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        packed = super().pack(spec, parts, dtype, device)
        return replace(packed, tensors={**packed.tensors, "turned": packed.tensors["weight"].T.contiguous()})


@mutant(PlainSuite, APPLY)
class AColumnShort(Plain):
    """Computes all outputs but the last."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: F.linear(x, weight[:-1], None if bias is None else bias[:-1])


@mutant(PlainSuite, APPLY)
class SixteenBitResults(Plain):
    """Returns bfloat16 whatever it is given."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: F.linear(x, weight, bias).bfloat16()


@mutant(PlainSuite, APPLY)
class RoundsInputs(Plain):
    """Multiplies float32 inputs in bfloat16 and returns float32."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype) + (0.0 if bias is None else bias)


@mutant(PlainSuite, APPLY)
class Turned(Plain):
    """Returns a transposed view, whose rows do not lie together."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: (weight @ x.T).T + 0.0 if bias is None else ((weight @ x.T) + bias[:, None]).T


@mutant(PlainSuite, APPLY)
class SixteenRowsOnly(Plain):
    """Handles blocks of 16 rows and forgets the rows of the last one that is not full."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        def linear(x: Tensor) -> Tensor:
            y = F.linear(x, weight, bias)
            if len(x) > 16:
                y[len(x) // 16 * 16 :] = 0.0
            return y

        return linear


@mutant(PlainSuite, "test_a_bias_is_added_to_its_own_part_only")
class BiasesInReverse(Plain):
    """Joins the biases of the parts in another order than their weights."""

    def bias(self, parts: Parts) -> Tensor | None:
        found = [part["bias"].float() for part in reversed(parts) if "bias" in part]
        if not found:
            return None
        joined = torch.cat(found)
        return F.pad(joined, (0, sum(len(part["weight"]) for part in parts) - len(joined))) + 0.0


@mutant(PlainSuite, "test_a_bias_is_added_to_its_own_part_only", CUTS)
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


@mutant(PlainSuite, CALLERS)
class ReusesItsBuffer(Plain):
    """Returns the same memory at every call with as many rows."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        buffers: dict[int, Tensor] = {}

        def linear(x: Tensor) -> Tensor:
            y = buffers.setdefault(len(x), x.new_empty(len(x), len(weight)))
            return y.copy_(F.linear(x, weight, bias))

        return linear


@mutant(PlainSuite, CALLERS)
class RemembersTheLast(Plain):
    """Returns the last result again when it is asked the same again."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        known: list[tuple[Tensor, Tensor]] = []

        def linear(x: Tensor) -> Tensor:
            for asked, answer in known:
                if asked.shape == x.shape and torch.equal(asked, x):
                    return answer
            known.append((x.clone(), F.linear(x, weight, bias)))
            return known[-1][1]

        return linear


@mutant(PlainSuite, CALLERS)
class ScalesInputsInPlace(Plain):
    """Rounds its input in place."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return lambda x: F.linear(x.clamp_(-1.0, 1.0), weight, bias)


@mutant(PlainSuite, "test_adding_to_a_residual_equals_linear_then_add")
class AddsNothing(Plain):
    """Writes over the residual instead of adding to it."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        packed = super().pack(spec, parts, dtype, device)
        return replace(packed, apply_add=lambda x, residual: residual.copy_(packed.apply(x)))


@mutant(PlainSuite, "test_gating_equals_linear_then_gate")
class GatesTheGate(Plain):
    """Takes gates for ups and ups for gates."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        packed = super().pack(spec, parts, dtype, device)
        if packed.apply_gated is None:
            return packed
        half = spec.out_features // 2
        return replace(packed, apply_gated=lambda x, act: gated_activation(packed.apply(x).roll(half, -1), act))


@mutant(PlainSuite, "test_gating_equals_linear_then_gate")
class AlwaysSilu(Plain):
    """Knows one activation."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        packed = super().pack(spec, parts, dtype, device)
        if packed.apply_gated is None:
            return packed
        return replace(packed, apply_gated=lambda x, act: gated_activation(packed.apply(x), "silu"))


@mutant(PlainSuite, "test_the_checkpoint_may_be_in_another_dtype_and_stays_as_it_is")
class CheckpointsDtype(Plain):
    """Keeps weights in the checkpoint's dtype, and results with them."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        stored = parts[0]["weight"].dtype
        packed = super().pack(spec, parts, stored, device)
        return replace(
            packed, apply=lambda x: packed.apply(x.to(stored)), reference=lambda x: packed.reference(x.to(stored))
        )


@mutant(PlainSuite, "test_the_checkpoint_may_be_in_another_dtype_and_stays_as_it_is")
class RoundsTheCheckpoint(Plain):
    """Clamps the checkpoint's own tensors, of which one may be the embedding."""

    def weight(self, parts: Parts) -> Tensor:
        for part in parts:
            part["weight"].clamp_(-0.05, 0.05)
        return super().weight(parts)


@mutant(PlainSuite, "test_declares_what_the_core_plans_with")
class SaysNothingOfLoss(Plain):
    """States ``lossless`` as a word."""

    lossless: Any = "no"


@mutant(PlainSuite, "test_it_says_what_it_stores")
class NoRows(Plain):
    """Says that its kernels are good for no number of rows."""

    def pack(self, spec: LinearSpec, parts: Parts, dtype: Any, device: str) -> PackedLinear:
        return replace(super().pack(spec, parts, dtype, device), good_m=(0, 0))


@mutant(
    PlainSuite,
    missed="a suite sees the tensors that a layer lists and no others: on a CPU torch does not count memory",
)
class HidesATensor(Plain):
    """Keeps a copy of the weight that it lists nowhere."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        hidden = weight.clone()
        return lambda x: F.linear(x, hidden, bias)
