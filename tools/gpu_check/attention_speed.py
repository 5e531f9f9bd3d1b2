"""Time per layer of the Triton attention kernel inside a graph: decode against reading, prefill against the GEMM."""

from __future__ import annotations

import torch

from engine.testing.attention_cases import AttentionCase, make_context, make_inputs
from gpu_check.attention import forward_of, kernels
from gpu_check.section import Context, Row, time_row
from gpu_check.timing import device_ms

LAYERS = 8
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


def run(context: Context) -> None:
    cases = [
        AttentionCase(f"decode {rows} x {length}", ((1, length),) * rows, **HEADS)
        for rows, length in ((1, 1000), (1, 8000), (1, 32000), (8, 4000), (64, 1000))
    ]
    cases += [AttentionCase("verify 8 of 8000", ((8, 8000),), **HEADS)]
    cases += [AttentionCase(f"prefill {n}", ((n, n),), **HEADS) for n in (512, 2048, 8192)]
    for case in cases:
        context.emit(measured(case, context.rates))


def measured(case: AttentionCase, rates: dict[str, float]) -> Row:
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
    if case.name.startswith("prefill"):
        pairs = sum(q_len * (kv_len - (q_len - 1) / 2) for q_len, kv_len in case.rows)
        limit = 4 * pairs * case.num_heads * case.head_dim / rates["gemm_tflop_s"] / 1e9
    else:
        read = sum(kv_len for _, kv_len in case.rows) * case.num_kv_heads * case.head_dim * 2 * 2
        limit = read / rates["read_gb_s"] / 1e6
    return time_row(f"attention of a layer, {case.name}", ms, limit)
