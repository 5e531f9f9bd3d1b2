"""Every attention kernel, every case, every dtype, against float64; and captured once, replayed on other lengths."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.testing.attention_cases import (
    LARGE_CASES,
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    error,
    make_context,
    make_inputs,
    measure,
    reference,
)
from gpu_check.section import Context, Row

DRY_RUN_CASES = ("one_token", "verify", "head_dim_80")
REPLAYS = "triton attention replayed from a CUDA graph, float32"
REPLAYED = ("verify", "decode_batch", "verify_batch")


def kernels() -> dict[str, Callable[[BuildContext], Any]]:
    from engine_plugins.attention_kernel.torch_paged import TorchAttention
    from engine_plugins.attention_kernel.triton.kernel import TritonAttention

    return {
        "triton": lambda context: TritonAttention(SlotConfig(), context),
        "torch": lambda context: TorchAttention(SlotConfig(), context),
    }


def run(context: Context) -> None:
    cases: tuple[AttentionCase, ...] = (*LARGE_CASES, *SMALL_CASES)
    dtypes: tuple[str, ...] = ("bfloat16", "float32", "float16")
    if context.dry_run:
        cases, dtypes = tuple(case for case in cases if case.name in DRY_RUN_CASES), ("float32",)
    else:
        if not context.has(REPLAYS):
            context.emit(replays())
    for name, make in kernels().items():
        for dtype in dtypes:
            metric = f"{name} attention, {dtype}"
            if context.has(metric):
                continue
            found = {case.name: worst(partial(measure, make, case, dtype, context.device)) for case in cases}
            context.emit(verdict(metric, found, TOLERANCE[dtype]))


def worst(check: Callable[[], float]) -> float | str:
    """The error of a case, or what it raised: one broken case must not hide the others."""
    try:
        return check()
    except Exception as problem:
        traceback.print_exc()
        return f"{type(problem).__name__}: {problem}"[:300]


def verdict(metric: str, found: dict[str, float | str], tolerance: float) -> Row:
    """How many of the cases are within the tolerance; which are not, and the largest error, are in the detail."""
    wrong = {name: value for name, value in found.items() if isinstance(value, str) or not value <= tolerance}
    largest = max((value for value in found.values() if not isinstance(value, str)), default=None)
    detail = {"wrong": {name: str(value) for name, value in wrong.items()}, "largest_error": str(largest)}
    passed = f"{len(found) - len(wrong)} of {len(found)} cases"
    return Row(metric, passed, target=f"error <= {tolerance:.1e}", held=bool(found) and not wrong, detail=detail)


def replays() -> Row:
    """One launch shape serves every context: captured on the shortest lengths, replayed on the real ones."""
    cases = [case for case in (*SMALL_CASES, *LARGE_CASES) if case.name in REPLAYED]
    found = {case.name: worst(partial(replay_error, case)) for case in cases}
    return verdict(REPLAYS, found, TOLERANCE["float32"])


def replay_error(case: AttentionCase) -> float:
    inputs = make_inputs(case, "float32", "cuda")
    real, most = inputs.batch, max(q_len for q_len, _ in case.rows)
    lengths = real.kv_lens_device.clone()
    prepared_as = dataclasses.replace(real, q_lens=(most,) * len(case.rows), kv_lens=(most,) * len(case.rows))
    kernel = kernels()["triton"](make_context(case, "float32", "cuda"))
    prepared = kernel.prepare(prepared_as)
    real.kv_lens_device.fill_(most)
    once = forward_of(kernel, prepared, case, inputs)
    once()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = once()
    real.kv_lens_device.copy_(lengths)
    graph.replay()
    torch.cuda.synchronize()
    return error(out, reference(case, inputs))


def forward_of(kernel: Any, prepared: Any, case: AttentionCase, inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    """One call of a prepared kernel on a case."""
    return lambda: kernel.forward(prepared, case.op, inputs.q, inputs.cache, *inputs.more)
