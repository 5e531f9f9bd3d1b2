"""The linears of a Llama-3.1-8B layer in each weight format, inside a graph, against reading them and against bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import PlainWeight
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target, pack_weight
from gpu_check import floors
from gpu_check.formats import Format, few_or_many
from gpu_check.section import Context, time_row
from gpu_check.shapes import SHAPES
from gpu_check.timing import device_ms

ROWS = (1, 8, 16, 64, 512)
LAYERS = 3
"""With weights of their own: together more than the L2 cache holds, in 4 bits too."""
FORMATS = (
    Format("fp8"), Format("fp8", "fp8"), Format("int8"), Format("int8", "int8"), Format("int4", group_size=128),
)  # fmt: skip
Product = tuple[Callable[[Tensor], Tensor], int]


def sizes() -> tuple[tuple[int, int], ...]:
    """Output and input features of a layer's linears."""
    shape = SHAPES["8b"]
    hidden, q = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    return ((q + 2 * kv, hidden), (hidden, q), (2 * shape.intermediate_size, hidden), (hidden, shape.intermediate_size))


def plain(out_features: int, in_features: int) -> PackedLinear:
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    spec = LinearSpec((LinearPart("linear", out_features),), in_features)
    return pack_weight(spec, PlainWeight(weight), Target("cuda", torch.bfloat16))


def run(context: Context) -> None:
    baseline: dict[int, float] = {}
    operands = {"bf16": "bf16"} | {form.name: form.activations for form in FORMATS}
    makers = {"bf16": plain} | {form.name: partial(quantized, form) for form in FORMATS}
    for name, make in makers.items():
        metrics = {rows: f"8B layer's linears, {name}, {rows} rows" for rows in ROWS}
        if baseline and context.has(*metrics.values()):
            continue
        packed = [(make(out, size), size) for _ in range(LAYERS) for out, size in sizes()]
        held = sum(linear.num_bytes for linear, _ in packed) / LAYERS
        products = [(few_or_many(linear, size, "cuda"), size) for linear, size in packed]
        for rows, metric in metrics.items():
            ms = layer_ms(products, rows)
            baseline.setdefault(rows, ms)
            weights = sum(out * size for out, size in sizes())
            bars = context.bars(floors.linears(held, weights, rows, operands[name]))
            detail = {"bf16_ms": baseline[rows], "times_faster": round(baseline[rows] / ms, 2), "GB/s": held / ms / 1e6}
            context.emit(time_row(metric, ms, bars, detail=detail))
        del packed, products


def quantized(form: Format, out_features: int, in_features: int) -> PackedLinear:
    return form.packed(form.weight(out_features, in_features, "cuda"), "cuda")


def layer_ms(products: list[Product], rows: int) -> float:
    """One layer's linears, one after another."""
    inputs = {size: torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for _, size in products}

    def once() -> None:
        for call, size in products:
            call(inputs[size])

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return device_ms(graph.replay, "cuda") / LAYERS
