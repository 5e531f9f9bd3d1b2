"""Time per layer of the Triton attention kernel inside a graph, against what the card reads and multiplies."""

from __future__ import annotations

import torch

from engine.testing.attention_cases import AttentionCase, make_context, make_inputs
from gpu_check import floors
from gpu_check.attention import forward_of, kernels
from gpu_check.section import Context, Row, time_row
from gpu_check.timing import device_ms

LAYERS = 8
SINKS = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "block_size": 16, "window": 128, "sinks": True}
"""gpt-oss."""
LATENT = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "block_size": 64}
"""DeepSeek V3."""
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


def run(context: Context) -> None:
    cases = [
        AttentionCase(f"decode {rows} x {length}", ((1, length),) * rows, **HEADS)
        for rows, length in ((1, 1000), (1, 8000), (1, 32000), (8, 4000), (64, 1000))
    ]
    cases += [AttentionCase("verify 8 of 8000", ((8, 8000),), **HEADS)]
    cases += [
        AttentionCase(f"decode {rows} x 8000, window 128, sinks", ((1, 8000),) * rows, **SINKS) for rows in (1, 64)
    ]
    cases += [
        AttentionCase(f"MLA decode {rows} x {length}", ((1, length),) * rows, **LATENT)
        for rows, length in ((1, 1000), (1, 8000), (1, 32000), (8, 4000), (64, 1000))
    ]
    cases += [AttentionCase("MLA verify 4 of 8000", ((4, 8000),), **LATENT)]
    cases += [AttentionCase(f"prefill {n}", ((n, n),), **HEADS) for n in (512, 2048, 8192)]
    for case in cases:
        if not context.has(metric_of(case)):
            context.emit(measured(case, context))


def metric_of(case: AttentionCase) -> str:
    """The name of a case's row."""
    return f"attention of a layer, {case.name}"


def measured(case: AttentionCase, context: Context) -> Row:
    """One layer's keys and values may stay in the L2 cache over the repeats: shares above 100 % are possible."""
    inputs = make_inputs(case, "bfloat16", "cuda")
    kernel = kernels()["triton"](make_context(case, "bfloat16", "cuda"))
    once = forward_of(kernel, kernel.prepare(inputs.batch), case, inputs)
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            once()
    ms = device_ms(graph.replay, "cuda") / LAYERS
    return time_row(metric_of(case), ms, context.bars(floors.attention(case)))
