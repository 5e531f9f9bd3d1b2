"""float32 and bfloat16 linear layers on CPUs: one layout of the weights for every number of rows, each read once."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.contracts.ops import LinearPart, LinearSpec
from engine.kernels.cpu.linear.panel_linear import (
    PANEL,
    PanelCall,
    PanelLayer,
    PanelLinear,
    in_turns,
    load_linears,
    whole_pairs,
)
from engine.kernels.cpu.linear.rates import fastest_rates, threads
from engine.kernels.cpu.linear.sources import float_source
from engine.kernels.linear import PackedLinear

INPUT_MULTIPLES = {torch.float32: 1, torch.bfloat16: 32}
"""``in_features`` must be a multiple of it, by dtype. 32: the inputs an AMX tile takes at once."""
DTYPES = tuple(INPUT_MULTIPLES)
INSTRUCTIONS = ("plain C++", "AVX2", "AVX512", "AVX512-BF16", "AMX-BF16")
"""By the numbers ``float_linear.cpp`` gives them."""
PROBE_ROWS, PROBE_OUTPUTS, PROBE_INPUTS = 64, 512, 1024
"""Of a product whose rate is measured: enough rows to be bound by arithmetic, weights that fit a second-level cache."""


@cache
def kernels(dtype: torch.dtype) -> Any:
    """The compiled functions, of :data:`DTYPES`. Raises :class:`engine.native.NativeError`."""
    return load_linears(float_source(_short(dtype)))


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """Of :data:`INSTRUCTIONS`, what this process may use for weights of this type."""
    bits = kernels(dtype).instructions()
    return tuple(name for number, name in enumerate(INSTRUCTIONS) if bits >> number & 1)


def best_instructions(dtype: torch.dtype) -> str:
    """Of :func:`available`, the fastest: which that is for bfloat16 differs from processor to processor."""
    if dtype == torch.float32:
        return available(dtype)[-1]
    measured = bfloat16_rates()
    return max(measured, key=measured.__getitem__)


@cache
def bfloat16_rates() -> dict[str, float]:
    """GFLOP/s of each of :func:`available`, by one thread, with many rows."""
    # Asking what is available gets this process leave to use AMX, also where another one has measured.
    source = float_source("bfloat16")
    return native.rates(source.file, available(torch.bfloat16), _measure_bfloat16, source.macros)


def _measure_bfloat16() -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)  # torch's own would then differ between first and later starts
    weight, x = (torch.randn(n, PROBE_INPUTS, generator=generator).bfloat16() for n in (PROBE_OUTPUTS, PROBE_ROWS))
    spec = LinearSpec((LinearPart("probe", PROBE_OUTPUTS),), PROBE_INPUTS)
    packed = {name: pack_float(spec, weight, None, name) for name in available(torch.bfloat16)}
    with threads(1):
        return fastest_rates(packed, x)


def can_pack(spec: LinearSpec, dtype: torch.dtype) -> bool:
    """Whether :func:`pack_float` takes a layer."""
    return dtype in DTYPES and spec.in_features % INPUT_MULTIPLES[dtype] == 0


def to_panels(weight: Tensor) -> Tensor:
    """``[out, in]``, whole pairs of panels -> ``[panels, in / n, 16, n]``. ``n``: inputs in 32 bits."""
    each = 4 // weight.itemsize
    return weight.view(-1, PANEL, weight.shape[1] // each, each).transpose(1, 2).contiguous()


def from_panels(panels: Tensor, out_features: int) -> Tensor:
    """The inverse of :func:`to_panels`."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:out_features]


def pack_float(spec: LinearSpec, weight: Tensor, bias: Tensor | None, instructions: str | None = None) -> PackedLinear:
    """``weight``: float32 or bfloat16 ``[out, in]``, as x and results are; ``bias``: ``[out]`` in any float type, or
    ``None``.

    ``instructions``: one of :data:`INSTRUCTIONS`, by default the best there are.
    """
    label = instructions or _described_best(weight.dtype)
    number = INSTRUCTIONS.index(instructions or best_instructions(weight.dtype))
    out_features, in_features = weight.shape
    gated = spec.kind == "gate_up"
    panels = to_panels(in_turns(weight, gated))
    biases = None if bias is None else in_turns(bias.float(), gated)

    def call(dtype: torch.dtype, columns: int, activation: int) -> PanelCall:
        assert dtype == panels.dtype
        linear = PanelLinear(in_features, columns, panels.data_ptr(), native.pointer(biases), activation, number)
        return PanelCall(kernels(dtype).linear, linear, in_features)

    layer = PanelLayer(in_features, out_features, gated, (weight.dtype,), call)

    def reference(x: Tensor) -> Tensor:
        """Plain ``F.linear`` on the weights taken back out of their layout; keeps no second copy."""
        columns = whole_pairs(out_features, gated) if gated else out_features
        bias = None if biases is None else biases[:columns].to(x.dtype)
        return layer.in_order(F.linear(x, from_panels(panels, columns), bias))

    tensors = {"weight": panels} if biases is None else {"weight": panels, "bias": biases}
    return layer.packed(tensors, reference, f"{_short(weight.dtype)} panels, {label}")


def _described_best(dtype: torch.dtype) -> str:
    """With the rates, where they were measured to choose."""
    best = best_instructions(dtype)
    rates = {} if dtype == torch.float32 else dict(bfloat16_rates())
    rate = rates.pop(best, 0.0)
    if not rates:
        return best
    second = max(rates, key=rates.__getitem__)
    return f"{best} ({rate:.0f} GFLOP/s a core; {second} {rates[second]:.0f})"


def packed_bytes(spec: LinearSpec, dtype: torch.dtype) -> int:
    """Bytes of what :func:`pack_float` keeps: whole pairs of panels, and a float32 bias."""
    padded = whole_pairs(spec.out_features, spec.kind == "gate_up")
    bias = padded * torch.float32.itemsize if any(part.bias for part in spec.parts) else 0
    return padded * spec.in_features * dtype.itemsize + bias


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
