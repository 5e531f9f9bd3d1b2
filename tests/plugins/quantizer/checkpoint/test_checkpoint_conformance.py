"""The reader keeps the slot's promises, in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from tests.plugins.quantizer.checkpoint.writers import Case, awq, ct_fp8, ct_int8, ct_packed, gptq
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import Quantizer
from engine.testing.context import build_context
from engine.testing.quantizer import QuantizerConformance
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.quantizer import FromCheckpoint


class ReaderConformance(QuantizerConformance):
    """Layers as ``case`` writes them; heads that its format leaves alone are unquantized."""

    case: Case
    packed: LinearSpec
    """Whose tensors were written last."""

    def make(self) -> Quantizer:
        context = build_context()
        model = replace(context.model, quantization=self.case.quantization, tie_embeddings=False)
        return FromCheckpoint(CheckpointConfig(activations="bf16"), replace(context, model=model))

    def parts(self, spec: LinearSpec, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        self.packed = spec
        plain = super().parts(spec, torch.float32)
        if {stored.suffix for stored in self.make().stored(spec)} == {"weight", "bias"}:
            return [{name: tensor.to(dtype) for name, tensor in tensors.items()} for tensors in plain]
        biases = [{name: tensor.to(dtype) for name, tensor in part.items() if name == "bias"} for part in plain]
        return [self.case.write(part["weight"])[0] | bias for part, bias in zip(plain, biases, strict=True)]

    def weights(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        plain = super().parts(self.packed, torch.float32)
        if "weight" in parts[0] and parts[0]["weight"].dtype in (torch.float32, torch.bfloat16):
            return [tensors["weight"] for tensors in parts]
        return [self.case.write(part["weight"])[1] for part in plain]


class TestFP8InBlocks(ReaderConformance):
    case = ct_fp8("block")


class TestFP8WithTheHead(ReaderConformance):
    case = ct_fp8("channel", head=True)


class TestInt8(ReaderConformance):
    case = ct_int8()


class TestPackedWithZeroPoints(ReaderConformance):
    case = ct_packed(4, 32, symmetric=False)


class TestPackedInActivationOrder(ReaderConformance):
    case = ct_packed(4, 16, symmetric=True, ordered=True)


class TestAWQ(ReaderConformance):
    case = awq(32)


class TestGPTQ(ReaderConformance):
    case = gptq(4, 32, False, True, "gptq", head=True)


class TestGPTQIn8Bits(ReaderConformance):
    case = gptq(8, -1, True, False, "gptq_v2")
