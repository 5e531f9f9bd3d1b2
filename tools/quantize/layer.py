"""Quantize one layer of the running model: scales that are folded into what comes before, then rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.quantize.calibration import Inputs, LayerRunner, Linear, Moments
from tools.quantize.folding import Site, sites
from tools.quantize.gptq import aimed, gptq_codes
from tools.quantize.grid import Grid, levels
from tools.quantize.ranges import output_ranges
from tools.quantize.scaling import awq_scales, smooth_scales
from torch import Tensor

from engine.contracts.ops import DownResidual, LayerOp, OutResidual
from engine.models.required_tensors import linear_of
from engine_plugins.quantizer.rounding import to_fp8, to_int8
from engine_plugins.quantizer.weights import QuantizedWeight

METHODS = ("rtn", "awq", "gptq", "awq+gptq", "smoothquant", "fp8")
SCALED = ("awq", "awq+gptq", "smoothquant")
COMPENSATED = ("gptq", "awq+gptq")
IN_ORDER = ("awq", *COMPENSATED)
"""Methods that round one linear layer after another, each for the inputs that the rounded ones before it produce."""
WITHOUT_TEXT = ("rtn", "fp8")
"""Methods that look at weights alone."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize. ``method`` is one of :data:`METHODS`."""

    method: str
    grid: Grid
    by_activation: bool = True
    """gptq: columns with large inputs first."""
    damping: float = 0.01
    """gptq"""
    alpha: float = 0.5
    """smoothquant: how much of the difficulty moves to the weights."""


def quantize_layer(
    index: int,
    ops: Sequence[LayerOp],
    linears: Mapping[str, Linear],
    norms: dict[str, Tensor],
    recipe: Recipe,
    runner: LayerRunner | None,
) -> dict[str, QuantizedWeight]:
    """The layer's weights by the name of each part; moves the samples on. ``norms``: weights by checkpoint name,
    changed where scales are folded in. ``runner``: ``None`` for a method that needs no text."""
    mine = {i: linears[spec.parts[0].name] for i, op in enumerate(ops) if (spec := linear_of(op)) is not None}
    for linear in mine.values():
        linear.weight = linear.weight.float()
    if runner is not None and recipe.method in SCALED:
        inputs = runner.inputs(index, mine)
        for i, site in sites(ops, linears, norms).items():
            _scale(site, inputs[i], recipe)
    if recipe.method in IN_ORDER:
        assert runner is not None, f"{recipe.method} runs over calibration text"
        found = _in_order(index, ops, mine, recipe, runner)
    else:
        found = {i: _nearest(linear, recipe) for i, linear in mine.items()}
        if runner is not None:
            runner.advance(index)
    return {name: part for i, whole in found.items() for name, part in split(mine[i], whole).items()}


def _scale(site: Site, inputs: Inputs, recipe: Recipe) -> None:
    """Divide the inputs, and let the weight make up for it."""
    weight = site.linear.weight
    if recipe.method == "smoothquant":
        wanted = smooth_scales(weight, inputs.max_abs, recipe.alpha, site.share)
    else:
        wanted = awq_scales(weight, recipe.grid, inputs.hessian, inputs.mean_abs, site.share)
    site.linear.weight = site.linear.weight * site.fold(wanted)


def _nearest(linear: Linear, recipe: Recipe) -> QuantizedWeight:
    """All parts in one matrix, from the weights alone."""
    if recipe.method == "fp8":
        return to_fp8(linear.weight, linear.bias)
    if recipe.method == "smoothquant":
        return to_int8(linear.weight, linear.bias)
    found = levels(linear.weight, recipe.grid, None)
    return found.packed(found.rounded(linear.weight), linear.bias)


def _in_order(
    index: int, ops: Sequence[LayerOp], linears: Mapping[int, Linear], recipe: Recipe, runner: LayerRunner
) -> dict[int, QuantizedWeight]:
    """One linear after another, each on what the rounded ones before it produce."""
    found = {}
    for i, chosen in _segments(ops, linears):
        linear = linears[i]
        moments = runner.moments(index, chosen, linear, isinstance(ops[i], OutResidual | DownResidual))
        found[i] = _for_outputs(linear, moments, recipe)
        linear.rounded = found[i].dense()
        runner.advance_rounded(index, chosen)
        linear.rounded = None
    return found


def _for_outputs(linear: Linear, moments: Moments, recipe: Recipe) -> QuantizedWeight:
    """All parts in one matrix, with the output in view."""
    weight, hessian = linear.weight, moments.hessian
    if recipe.method not in COMPENSATED:
        grid = output_ranges(weight, recipe.grid, hessian, moments.target(weight))
        return grid.packed(grid.rounded(weight), linear.bias)
    weight = aimed(weight, moments, recipe.damping)
    grid = levels(weight, recipe.grid, hessian)
    codes = gptq_codes(weight, grid, hessian, by_activation=recipe.by_activation, damping=recipe.damping)
    return grid.packed(codes, linear.bias)


def _segments(ops: Sequence[LayerOp], linears: Mapping[int, Linear]) -> Iterator[tuple[int, slice]]:
    """Each op with a linear layer, and the ops up to the next one."""
    starts = sorted(linears)
    for start, end in zip(starts, [*starts[1:], len(ops)], strict=True):
        yield start, slice(start, end)


def split(linear: Linear, whole: QuantizedWeight) -> dict[str, QuantizedWeight]:
    """A fused weight as its parts, by name."""
    parts, start = {}, 0
    for part in linear.spec.parts:
        rows = slice(start, start + part.out_features)
        start = rows.stop
        parts[part.name] = QuantizedWeight(
            whole.codes[rows],
            whole.scale[rows],
            whole.group_size,
            bits=whole.bits,
            zero=None if whole.zero is None else whole.zero[rows],
            bias=None if whole.bias is None or not part.bias else whole.bias[rows],
        )
    return parts
