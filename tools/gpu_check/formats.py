"""Quantized linears of every format against float64 on the same device, from one row to many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight, WeightFormat
from engine.kernels.linear import PackedLinear
from engine.kernels.triton.launch import Launch, SkinnyLinear
from engine.kernels.triton.quantized.linear import pack_gpu
from engine.kernels.triton.tiles import MAX_ROWS
from engine.testing.context import build_context
from gpu_check.attention import verdict, worst
from gpu_check.section import Context

ROWS = (1, 8, 16, 17, 64, 512)
TOLERANCE = {"bf16": 2.0**-6, "int8": 0.04, "fp8": 0.12}
"""Largest accepted ``|got - want|`` as a share of the largest output, by what activations are rounded to; weights are
those that the format holds, so their rounding is no error here."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of quantized weights."""

    kind: str
    activations: str = "bf16"
    group_size: int | None = None
    """``None``: one scale per channel."""
    zeros: bool = False

    @property
    def name(self) -> str:
        groups = "" if self.group_size is None else f" g{self.group_size}"
        rounded = "" if self.activations == "bf16" else f" x {self.activations}"
        return f"{self.kind}{groups}{' zeros' if self.zeros else ''}{rounded}"

    def weight(self, out_features: int, in_features: int, device: str) -> QuantizedWeight:
        """Random codes, scaled so that outputs are about as large as inputs."""
        generator = torch.Generator(device).manual_seed(out_features + in_features)
        size, groups = (out_features, in_features), -(-in_features // (self.group_size or in_features))
        if self.kind == "fp8":
            codes = torch.randn(size, generator=generator, device=device).mul_(64).to(torch.float8_e4m3fn)
        else:
            levels = 8 if self.kind == "int4" else 128
            codes = torch.randint(-levels, levels, size, generator=generator, device=device, dtype=torch.int8)
        spread = {"fp8": 64.0, "int8": 74.0, "int4": 4.6}[self.kind] * in_features**0.5
        jitter = 0.5 + torch.rand(out_features, groups, generator=generator, device=device)
        scale = (jitter / spread).half().float()
        zero = None
        if self.zeros:
            zero = torch.randint(-3, 4, scale.shape, generator=generator, device=device, dtype=torch.int8)
        return QuantizedWeight(
            codes, scale, self.group_size or in_features, bits=self.bits, zero=zero, input_quant=self.input_quant
        )

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def input_quant(self) -> Literal["int8", "fp8"] | None:
        return next((kind for kind in ("int8", "fp8") if kind == self.activations), None)

    def of_weights(self, in_features: int) -> WeightFormat:
        """What is known before there are any."""
        group_size = self.group_size or in_features
        return WeightFormat(self.bits, group_size, self.kind == "fp8", self.zeros, input_quant=self.input_quant)

    def packed(self, weight: QuantizedWeight, device: str) -> PackedLinear:
        return pack_gpu(weight, self.activations, device, build_context().device.capability)


FORMATS = (
    Format("int8"), Format("int8", "int8"), Format("fp8"), Format("fp8", "fp8"), Format("fp8", group_size=128),
    Format("int4", group_size=128), Format("int4", group_size=32), Format("int4", group_size=128, zeros=True),
)  # fmt: skip


def few_or_many(packed: PackedLinear, in_features: int, device: str) -> Callable[[Tensor], Tensor]:
    """As a model runs it: fused kernels for few rows, the layer's own choice for more."""
    assert packed.tile_loader is not None
    few = SkinnyLinear(Launch.on(device), packed.tile_loader, in_features, packed.out_features)
    return lambda x: few.store(x) if x.shape[0] <= MAX_ROWS else packed.apply(x)


def run(context: Context) -> None:
    size = (48, 288) if context.dry_run else (4096, 14336)
    dtype = torch.float32 if context.dry_run else torch.bfloat16
    for form in FORMATS:
        metric = f"{form.name} weights"
        if context.has(metric):
            continue
        weight = form.weight(*size, context.device)
        call = few_or_many(form.packed(weight, context.device), size[1], context.device)
        rows = (1, 3, 17) if context.dry_run else ROWS
        found = {f"{n} rows": worst(partial(error, call, weight, n, dtype, context.device)) for n in rows}
        context.emit(verdict(metric, found, TOLERANCE[form.activations]))


def error(call: Callable[[Tensor], Tensor], weight: QuantizedWeight, rows: int, dtype: torch.dtype, at: str) -> float:
    x = torch.randn(rows, weight.in_features, generator=torch.Generator(at).manual_seed(rows), device=at).to(dtype)
    want = F.linear(x.double(), weight.dense().double())
    gap = (call(x).double() - want).abs().nan_to_num(nan=float("inf"))
    return float(gap.max() / want.abs().max())
