"""Attention inside a graph: its keys dealt out to more and fewer programs, merged in larger and smaller pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from engine.testing.attention_cases import AttentionCase, make_context, make_inputs
from engine_plugins.attention_kernel.triton import kernel, planning
from gpu_check import floors
from gpu_check.attention import forward_of, kernels
from gpu_check.in_turns import COMPILE_S, captured, replaced, suppress_and_say, wait_for_all
from gpu_check.section import Context, time_row
from gpu_check.timing import device_ms


def metric_of(name: str) -> str:
    """The name of a case's row."""
    return f"attention, {name}"


LENGTHS = ((1, 1000, 1), (8, 1000, 1), (4, 1000, 1), (1, 8000, 1), (8, 8000, 1), (1, 1000, 8), (4, 1000, 4))
"""Queries, keys, rows."""
CASES = {
    (name := f"head size {head_dim}, {rows} x {q_len} of {kv_len}"): AttentionCase(
        name, ((q_len, kv_len),) * rows, 32, 8, head_dim, 16
    )
    for head_dim, (q_len, kv_len, rows) in product((128, 64), LENGTHS)
}
CUT_METRICS = tuple(map(metric_of, CASES))


def cut_attention(context: Context, turn: Any, ready: Any) -> None:
    """Attention of layers with keys and values of their own, cut into more and fewer parts."""
    started = time.monotonic()
    graphs: dict[tuple[str, str], tuple[Callable[[], Any], int]] = {}
    kept: list[Any] = []  # a graph reads memory that it does not own
    for name, case in CASES.items():
        kv_len = case.rows[0][1]
        inputs = make_inputs(case, "bfloat16", "cuda")
        k, v = inputs.cache.k, inputs.cache.v
        caches = [replace(inputs.cache, k=k.clone(), v=v.clone()) for _ in range(max(2, min(24, 192000 // kv_len)))]
        for splits, merged in product((0, 2, 4, 8, 16, 32), (8192, 32768)):
            if (merged != planning.MERGED_VALUES and splits != 0) or time.monotonic() - started > COMPILE_S:
                continue
            cut = replaced(kernel, "num_splits", lambda programs, sms, queries, splits=splits: splits)
            with (
                suppress_and_say(f"{name}, {splits}"), cut if splits else nullcontext(),
                replaced(planning, "MERGED_VALUES", merged),
            ):  # fmt: skip
                made = kernels()["triton"](make_context(case, "bfloat16", "cuda"))
                prepared = made.prepare(inputs.batch)
                calls = [forward_of(made, prepared, case, replace(inputs, cache=cache)) for cache in caches]
                what = f"{splits or 'own'} parts, {merged} values merged at a time"
                graphs[name, what] = captured(partial(all_of, calls), "cuda"), len(calls)
                kept += [made, calls, prepared]
    wait_for_all(ready)
    with turn:
        found: dict[str, dict[str, float]] = {}
        for (name, what), (call, count) in graphs.items():
            found.setdefault(name, {})[what] = round(device_ms(call, "cuda", repeats=5) / count * 1e3, 2)
    for name, times in found.items():
        bars = context.bars(floors.attention(CASES[name])).times(1e3)
        context.emit(time_row(metric_of(name), next(iter(times.values())), bars, unit="us", detail=times))


def all_of(calls: Sequence[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()
