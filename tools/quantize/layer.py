"""Quantize one layer of the running model: scales that are folded into what comes before, then rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tools.quantize.calibration import Inputs, LayerRunner, Linear, Moments
from tools.quantize.folding import Site, readers, sites
from tools.quantize.gptq import aimed, gptq_codes
from tools.quantize.grid import Grid, levels
from tools.quantize.ranges import output_ranges
from tools.quantize.scaling import awq_scales, smooth_scales
from torch import Tensor

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import Add, Experts, LinearSpec
from engine.contracts.ops import Linear as LinearOp
from engine.contracts.quantizer import QuantizedWeight
from engine_plugins.quantizer.rounding import to_fp8, to_int8

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


def linear_ops(block: Block) -> Iterator[tuple[int, LinearOp]]:
    """The linear layers of a block that have weights of their own, by the index of their node."""
    for index, node in enumerate(block.nodes):
        if isinstance(node.op, LinearOp) and not node.op.tied:
            yield index, node.op


def expert_specs(block: Block) -> Iterator[LinearSpec]:
    """The linear layers of a block's experts."""
    for node in block.nodes:
        if isinstance(node.op, Experts):
            yield from node.op.linears


def quantize_layer(
    index: int,
    graph: Graph,
    linears: Mapping[str, Linear],
    norms: dict[str, Tensor],
    recipe: Recipe,
    runner: LayerRunner | None,
) -> dict[str, QuantizedWeight]:
    """The layer's weights by the name of each part; moves the samples on. ``norms``: weights by checkpoint name,
    changed where scales are folded in. ``runner``: ``None`` for a method that needs no text."""
    block = graph.layers[index]
    mine = {i: linears[op.spec.parts[0].name] for i, op in linear_ops(block)}
    for linear in mine.values():
        linear.weight = linear.weight.float()
    if runner is not None and recipe.method in SCALED:
        inputs = runner.inputs(index, mine)
        for i, site in sites(graph, block, linears, norms).items():
            _scale(site, inputs[i], recipe)
    if recipe.method in IN_ORDER:
        assert runner is not None, f"{recipe.method} runs over calibration text"
        found = _in_order(index, graph, mine, recipe, runner)
    else:
        found = {i: _nearest(linear, recipe) for i, linear in mine.items()}
        if runner is not None:
            runner.advance(index, slice(None))
    parts = {name: part for i, whole in found.items() for name, part in split(mine[i], whole).items()}
    for spec in expert_specs(block):
        expert = linears[spec.parts[0].name]
        parts |= split(expert, _nearest(expert, recipe))
    return parts


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
    weight = linear.weight.float()
    if recipe.method == "fp8":
        return to_fp8(weight, linear.bias)
    if recipe.method == "smoothquant":
        return to_int8(weight, linear.bias)
    found = levels(weight, recipe.grid, None)
    return found.packed(found.rounded(weight), linear.bias)


def _in_order(
    index: int, graph: Graph, linears: Mapping[int, Linear], recipe: Recipe, runner: LayerRunner
) -> dict[int, QuantizedWeight]:
    """One linear after another, each on what the rounded ones before it produce."""
    found, block = {}, graph.layers[index]
    starts = sorted(linears)
    before = slice(0, starts[0] if starts else len(block.nodes))
    runner.advance(index, before)
    runner.advance_rounded(index, before)
    for start, end in zip(starts, [*starts[1:], len(block.nodes)], strict=True):
        linear, node, nodes = linears[start], block.nodes[start], slice(start, end)
        moments = runner.moments(linear, node.inputs[0], _added_to(node, graph, runner))
        runner.advance(index, nodes)
        found[start] = _for_outputs(linear, moments, recipe)
        linear.rounded = found[start].dense()
        runner.advance_rounded(index, nodes)
        linear.rounded = None
    return found


def _added_to(node: Node, graph: Graph, runner: LayerRunner) -> int | None:
    """The value that a linear layer's output is added to, if nothing else reads the output, and it is computed by the
    time that the layer is."""
    reading = readers(graph, node.outputs[0])
    if len(node.outputs) > 1 or len(reading) != 1 or not isinstance(reading[0].op, Add):
        return None
    others = [value for value in reading[0].inputs if value != node.outputs[0]]
    return others[0] if others and runner.is_computed(others[0]) else None


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
