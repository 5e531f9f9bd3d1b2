"""A model with programmatic dependent launch switched off computes exactly what it does with it.

A kernel that reads what its predecessor has not written yet is right most of the time; so this compares whole
generations through captured steps, where kernels follow one another as closely as they ever do.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.kernels.triton.device import has_dependent_launch
from gpu_check.engine_run import EngineRun, Tokens
from gpu_check.section import Context, Row
from gpu_check.shapes import SHAPES, write

LAYERS, STEPS = 4, 48


def run(context: Context) -> None:
    if not has_dependent_launch(context.device):
        context.emit(Row("PDL on and off", detail="this device has none (compute capability below 9.0)"))
        return
    for name, shape in SHAPES.items():
        metric = f"{name} widths, PDL on and off"
        if context.has(metric):
            continue
        folder = context.scratch / f"dependent-launch-{name}"
        write(replace(shape, num_hidden_layers=LAYERS), folder, torch.bfloat16, context.device)
        with_it = outputs(folder, context)
        with switched_off():
            without = outputs(folder, context)
        shutil.rmtree(folder)
        differ = sum(a != b for a, b in zip(with_it[0], without[0], strict=True))
        pairs = zip(with_it[1], without[1], strict=True)
        largest = max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())
        detail = {"largest_logprob_difference": largest}
        context.emit(
            Row(
                metric, f"{differ} of {len(with_it[0])} outputs differ",
                target="0, logprobs equal", held=differ == 0 and largest == 0.0, detail=detail,
            )
        )  # fmt: skip


def outputs(folder: object, context: Context) -> tuple[list[Tokens], list[dict[int, float]]]:
    """Greedy tokens of batches of 1, 8 and 24, and the first logprobs."""
    run = EngineRun(str(folder), context.device, ["scheduler.max_requests=24", "drafter=none", "model.max_len=1024"])
    prompts = [tuple((i * 131 + j * 17) % 1000 + 4 for j in range(20 + 11 * i)) for i in range(24)]
    found = [tokens for batch in (1, 8, 24) for tokens in run.generate(prompts[:batch], STEPS)]
    logprobs = run.logprobs(prompts)
    run.close()
    return found, logprobs


@contextmanager
def switched_off() -> Iterator[None]:
    """Every module that asks whether the device has dependent launch is told no. Raises ``RuntimeError`` if none
    asks: then nothing was switched off."""
    name, here = has_dependent_launch.__name__, (__name__, has_dependent_launch.__module__)
    asking = [
        module for module in list(sys.modules.values())
        if module is not None and module.__name__ not in here and getattr(module, name, None) is has_dependent_launch
    ]  # fmt: skip
    if not asking:
        raise RuntimeError(f"no loaded module uses {name}")
    try:
        for module in asking:
            setattr(module, name, lambda device: False)
        yield
    finally:
        for module in asking:
            setattr(module, name, has_dependent_launch)
