"""How exact linear layers are on this CPU, for every way to compute them that this machine has.

    python tools/benchmarks/linear_accuracy.py

Weights and inputs are normal random numbers. Products are compared with those of the same stored weights and inputs in
float64; where inputs are rounded to 8 bits, of the rounded ones. Errors are the root mean square and the largest, as
shares of the root mean square of the result.

sums: of the first of 512 rows, in float32, before they are rounded to bfloat16. They show where something is subtracted
from them first: a residual, and then a bias. torch's do not.
results: in the dtype of the layer, of 1, 8, 64 and 512 rows: the largest.
rows: whether a row has the same bits whatever the number of rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.kernels.cpu.linear.panel_linear import PAIR
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import quantized_rows
from engine_plugins.quantizer.rounding import to_int4, to_int8

SHAPES = ((896, 9728), (4864, 896), (4096, 4096))
"""Inputs and outputs: gate and up, and down, of the 386M model; a layer of a larger one."""
ROWS = (1, 8, 64, 512)
GROUP = 128
ROWS_EQUAL = {True: "equal", False: "differ", None: ""}

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to multiply: ``x [rows, in] -> [rows, out]``."""

    name: str
    results: Product
    sums: Product | None = None
    """``[1, out]`` of the first row; ``None`` where they do not show."""
    is_layer: bool = True
    """Else it is there to show what rounding alone makes."""


@dataclass(slots=True)
class Error:
    """The largest so far."""

    rms: float = 0.0
    largest: float = 0.0

    def add(self, got: Tensor, exact: Tensor) -> None:
        unit, error = exact.square().mean().sqrt(), got.double() - exact
        self.rms = max(self.rms, float(error.square().mean().sqrt() / unit))
        self.largest = max(self.largest, float(error.abs().max() / unit))

    def __str__(self) -> str:
        return f"{self.rms:.1e}, {self.largest:.1e}"


@dataclass(slots=True)
class Line:
    """Of the table."""

    sums: dict[int, Error] = field(default_factory=dict)
    """By number of inputs."""
    results: Error = field(default_factory=Error)
    rows_equal: bool | None = None

    def add(self, way: Way, x: Tensor, exact: Tensor) -> None:
        whole = way.results(x)
        for rows in ROWS:
            result = way.results(x[:rows])
            self.results.add(result, exact[:rows])
            if way.is_layer:
                self.rows_equal = self.rows_equal is not False and torch.equal(result, whole[:rows])
        if way.sums is not None:
            self.sums.setdefault(x.shape[1], Error()).add(way.sums(x), exact[:1])


def of_layer(name: str, packed: Callable[[Tensor | None], PackedLinear]) -> Way:
    """``packed(bias [out] or None)``"""
    layer = packed(None)

    def sums(x: Tensor) -> Tensor:
        result = layer.apply(x)
        if result.dtype == torch.float32:
            return result[:1]
        assert layer.apply_add is not None
        known = result[:1].float()
        known += layer.apply_add(x, -result)[:1]  # what rounding cut off, rounded to bfloat16
        return known.double() + packed(-known[0]).apply(x)[:1]  # and what that cut off

    return Way(name, layer.apply, sums)


def float_ways(weight: Tensor, wide: Tensor) -> Iterator[Way]:
    """``wide``: the weight in float64."""
    outputs, inputs = weight.shape
    spec = LinearSpec((LinearPart("w", outputs),), inputs)
    for name in float_linear.available(weight.dtype):

        def packed(bias: Tensor | None, name: str = name) -> PackedLinear:
            return float_linear.pack_float(spec, weight, bias, name)

        yield of_layer(name, packed)
    product = partial(F.linear, weight=weight)
    if weight.dtype == torch.float32:
        yield Way("torch", product, lambda x: product(x)[:1])
        return
    yield Way("torch", product)
    yield Way("float64, results rounded", lambda x: F.linear(x.double(), wide).to(weight.dtype), is_layer=False)


def integer_ways(weight: QuantizedWeight, wide: Tensor, activations: str) -> Iterator[Way]:
    best = integer_linear.INSTRUCTIONS.index(integer_linear.best_instructions())
    plain = integer_linear.laid_out(weight, gated=False)
    for name in integer_linear.INSTRUCTIONS[1 : best + 1]:

        def packed(bias: Tensor | None, name: str = name) -> PackedLinear:
            padded = None if bias is None else F.pad(bias, (0, -len(bias) % PAIR))
            return integer_linear.pack_panels(replace(plain, bias=padded), activations, name)

        yield of_layer(name, packed)
    if activations == "int8":
        yield Way("float64, inputs not rounded", lambda x: F.linear(x.double(), wide), is_layer=False)


def kinds(inputs: int, outputs: int) -> Iterator[tuple[str, Tensor, Tensor, Iterator[Way]]]:
    """Name, x, the product in float64, and ways to compute it."""
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(size, inputs, generator=generator) for size in (ROWS[-1], outputs))
    for dtype in float_linear.DTYPES:
        stored, given = weight.to(dtype), x.to(dtype)
        wide = stored.double()
        yield str(dtype).removeprefix("torch."), given, F.linear(given.double(), wide), float_ways(stored, wide)
    x = x.bfloat16()
    codes, step = quantized_rows(x, "int8")
    for bits, rounded in ((8, to_int8(weight, None)), (4, to_int4(weight, None, GROUP))):
        scale = rounded.scale.double().repeat_interleave(rounded.group_size, dim=1)[:, :inputs]
        wide = rounded.codes.double() * scale
        yield f"int{bits}", x, F.linear(x.double(), wide), integer_ways(rounded, wide, "bf16")
        exact = F.linear(codes.double() * step.double(), wide)
        yield f"int{bits}, int8 activations", x, exact, integer_ways(rounded, wide, "int8")


def table() -> dict[tuple[str, str], Line]:
    """By kind and way."""
    lines: dict[tuple[str, str], Line] = {}
    for inputs, outputs in SHAPES:
        for kind, x, exact, ways in kinds(inputs, outputs):
            for way in ways:
                lines.setdefault((kind, way.name), Line()).add(way, x, exact)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    shapes = " | ".join(f"sums, {inputs} to {outputs}" for inputs, outputs in SHAPES)
    print(f"| weights | computed by | {shapes} | results | rows |\n|{'---|' * (len(SHAPES) + 4)}")
    for (kind, name), line in table().items():
        sums = " | ".join(str(line.sums.get(inputs, "")) for inputs, _ in SHAPES)
        print(f"| {kind} | {name} | {sums} | {line.results} | {ROWS_EQUAL[line.rows_equal]} |")


if __name__ == "__main__":
    main()
