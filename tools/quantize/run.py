"""From a model to a quantized checkpoint: load, look at calibration text, round layer by layer, write."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tools.quantize.calibration import LayerRunner, Linear, Recorder
from tools.quantize.grid import Grid, levels
from tools.quantize.layer import WITHOUT_TEXT, Recipe, expert_specs, linear_ops, quantize_layer
from tools.quantize.writer import ShardWriter, new_folder, part_tensors, quantization_config, write_config
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.compose import quoted
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import Checkpoint
from engine.contracts.graph import Block, Graph
from engine.contracts.ops import Experts, HeadLinear, Norm, Router
from engine.contracts.ops import Linear as LinearOp
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.model import LoweredModel
from engine.models.checkpoint_checks import checked_checkpoint
from engine.models.manifest import Manifest
from engine.service.tokenizer import Tokenizer
from engine.startup.lowering import lowering_of
from engine_lab.eval.windows import read_prompts, read_text

HEAD_BITS = 8
UNPACKED = ("smoothquant", "fp8")
"""Methods whose weights take a byte each."""
WITH_ZEROS = ("awq",)
"""Methods that have zero points unless told otherwise, as the paper's own format has."""


@dataclass(frozen=True, slots=True)
class Source:
    """The unquantized model, running in float32, with its linear layers at hand."""

    plan: EnginePlan
    graph: Graph
    model: LoweredModel
    linears: dict[str, Linear]
    checkpoint: Checkpoint

    @property
    def stored(self) -> torch.dtype:
        """Of the checkpoint's weights."""
        dtype = getattr(torch, self.plan.model.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@torch.inference_mode()
def quantize(arguments: argparse.Namespace) -> str:
    """Do what the command line says; returns a sentence on what was written.

    Raises ``ValueError``, and what :func:`engine.assembly.assemble.assemble`, the checkpoint and the tokenizer raise,
    for what cannot be done; then nothing is written.
    """
    out: Path = arguments.out
    with new_folder(out) as folder:
        source = load_source(arguments.model, arguments.device)
        recipe = recipe_of(arguments, source.stored)
        _check_experts(source, recipe)
        runner = None if recipe.method in WITHOUT_TEXT else _runner(source, samples(arguments, source.plan))
        num_bytes = _write(source, recipe, runner, arguments.head == "int8", folder)
    return f"{out}: {recipe.method}, {num_bytes / 2**20:.1f} MiB of tensors"


def _check_experts(source: Source, recipe: Recipe) -> None:
    """Raise ``ValueError`` for experts and a method that looks at the inputs of every linear layer."""
    if recipe.method not in WITHOUT_TEXT and any(isinstance(node.op, Experts) for node in source.graph.nodes):
        methods = " or ".join(WITHOUT_TEXT)
        raise ValueError(
            f"--method {recipe.method}: {source.plan.model.name} has experts, and what goes into each of them is not "
            f"looked at; use --method {methods}"
        )


def recipe_of(arguments: argparse.Namespace, stored: torch.dtype) -> Recipe:
    """Raises ``ValueError`` for numbers out of range."""
    if not 0.0 <= arguments.alpha <= 1.0:
        raise ValueError(f"--alpha {arguments.alpha:g}: expected a number from 0 to 1")
    if not arguments.damping > 0.0:
        raise ValueError(f"--damping {arguments.damping:g}: expected a positive number")
    asymmetric = arguments.method in WITH_ZEROS if arguments.asymmetric is None else arguments.asymmetric
    grid = Grid(arguments.bits, arguments.group_size, not asymmetric, stored)
    return Recipe(arguments.method, grid, not arguments.no_act_order, arguments.damping, arguments.alpha)


def load_source(path: str, device: str) -> Source:
    """Load a checkpoint to run op by op in torch."""
    overrides = [f"model.path={quoted(path)}", f"device={device}", "execution=eager", "kv_format=native"]
    plan = assemble([*overrides, "attention_kernel=torch", "quantizer=none", "model.dtype=float32"], download=True)
    bound = bind(plan)
    graph = bound.graph
    checkpoint = checked_checkpoint(graph, bound.quantizer, plan.model.path)
    recorder = Recorder(checkpoint, bound.quantizer, replace(lowering_of(plan, bound, graph), kernels="reference"))
    with torch.inference_mode():
        model = recorder.load(graph, graph.max_position)
    return Source(plan, graph, model, recorder.linears, checkpoint)


def samples(arguments: argparse.Namespace, plan: EnginePlan) -> list[tuple[int, ...]]:
    """Token ids of pieces of the calibration text. Raises ``ValueError`` where there is none."""
    if bool(arguments.text) == bool(arguments.jsonl):
        raise ValueError(f"--method {arguments.method} needs calibration text: give either --text or --jsonl")
    size = min(arguments.sample_tokens, plan.max_len)
    tokenizer = Tokenizer.from_directory(plan.model.path)
    try:
        if arguments.text:
            windows = read_text(arguments.text, tokenizer.encode_now, size, size)
        else:
            windows = read_prompts(arguments.jsonl, tokenizer.encode_now, size, size)
    finally:
        tokenizer.close()
    picked = random.Random(arguments.seed).sample(windows, min(arguments.samples, len(windows)))
    return [window.tokens for window in picked]


def _runner(source: Source, pieces: Sequence[Sequence[int]]) -> LayerRunner:
    plan = source.plan
    return LayerRunner(plan.model, source.model, bind(plan).kv_format, pieces, plan.dtype, plan.device.kind)


def _write(source: Source, recipe: Recipe, runner: LayerRunner | None, with_head: bool, folder: Path) -> int:
    """Returns the bytes of all tensors."""
    shards, done = ShardWriter(folder), set[str]()
    for index, block in enumerate(source.graph.layers):
        for name, tensor in _layer(source, index, recipe, runner):
            shards.add({name: tensor})
            done.add(name)
        done |= _replaced(block)
        print(f"layer {index + 1} of {len(source.graph.layers)}", file=sys.stderr)
    head = source.graph.lm_head.spec.parts[0].name
    if with_head:
        shards.add(part_tensors(head, _rounded_head(source.linears[head], source.stored), source.stored, packed=True))
        done.add(f"{head}.weight")
    for name in sorted(source.checkpoint.names - done):
        shards.add({name: source.checkpoint.read(name)})
    ignored = [name for name in dict.fromkeys(_kept(source.graph)) if name != head or not with_head]
    section = quantization_config(recipe, HEAD_BITS if with_head else None, ignored)
    write_config(Path(source.plan.model.path), folder, section, untied=with_head)
    return shards.close()


def _replaced(block: Block) -> set[str]:
    """The tensors that a layer's quantized weights stand for."""
    specs = [*(op.spec for _, op in linear_ops(block)), *expert_specs(block)]
    found = {f"{part.name}.{suffix}" for spec in specs for part in spec.parts for suffix in ("weight", "bias")}
    for node in block.nodes:
        if isinstance(node.op, Experts) and node.op.fused is not None:
            together = Manifest(names=(node.op.fused.gate_up,)).of(node)
            found |= {tensor.name for weight in together for tensor in weight.tensors if tensor.required}
    return found


def _kept(graph: Graph) -> Iterator[str]:
    """Linear layers that stay as they are: those before and after the layers, of each head by itself, and
    routers."""
    for node in (*graph.embed.nodes, *graph.head.nodes):
        if isinstance(node.op, LinearOp):
            yield from (part.name for part in node.op.spec.parts)
    for node in graph.nodes:
        if isinstance(node.op, HeadLinear | Router):
            yield node.op.name


def _rounded_head(head: Linear, stored: torch.dtype) -> QuantizedWeight:
    """To the nearest with one scale per token of the vocabulary, as ``stored`` holds it."""
    weight = head.weight.float()
    found = levels(weight, Grid(HEAD_BITS, weight.shape[1], True, stored), None, clips=(1.0,))
    return found.packed(found.rounded(weight), None)


def _layer(source: Source, index: int, recipe: Recipe, runner: LayerRunner | None) -> Iterator[tuple[str, Tensor]]:
    """The layer's tensors by name: linears and norms. Moves the samples to the next layer."""
    block = source.graph.layers[index]
    norms = {name: source.checkpoint.read(name) for name in norm_names(block)}
    quantized = quantize_layer(index, source.graph, source.linears, norms, recipe, runner)
    for spec in (*(op.spec for _, op in linear_ops(block)), *expert_specs(block)):
        linear = source.linears[spec.parts[0].name]
        linear.weight = linear.weight.new_empty(0)  # one layer at a time is in float32
    yield from norms.items()
    for name, weight in quantized.items():
        yield from part_tensors(name, weight, source.stored, packed=recipe.method not in UNPACKED).items()


def norm_names(block: Block) -> list[str]:
    """The tensors of a layer's norms."""
    return [name for node in block.nodes if isinstance(node.op, Norm) for name, _ in node.op.tensors]
