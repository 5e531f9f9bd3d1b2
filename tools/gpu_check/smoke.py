"""The least that must work before the rest is worth its time: one kernel pair, one graph, two layers of a model.

Small models with true widths: eager steps and captured ones must give the same tokens, in bfloat16 and in int4.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch

from engine.kernels.triton.quantized import loaders
from gpu_check.attention import verdict, worst
from gpu_check.engine_run import EngineRun, Tokens
from gpu_check.in_turns import replaced
from gpu_check.linears import TOLERANCE, Layer, fused
from gpu_check.section import Context, Row
from gpu_check.shapes import shape_of, write

LAYERS, STEPS, ROWS = 2, 8, 2
PLANS = {"bf16": [], "int4": ["quantizer=int4"]}
SMALL = ["drafter=none", "scheduler.max_requests=2", "model.max_len=256", "scheduler.token_budget=64"]


def run(context: Context) -> None:
    shape = shape_of("1b", context.dry_run)
    dtype = torch.float32 if context.dry_run else torch.bfloat16
    if not context.dry_run:
        layer = Layer(shape, dtype, context.device, ROWS)
        found = {op: worst(check) for op, check in fused(layer)}
        context.emit(verdict("fused ops, dependent launch on and off", found, TOLERANCE["bfloat16"]))
    folder = context.scratch / "model-smoke"
    write(replace(shape, num_hidden_layers=LAYERS), folder, dtype, context.device)
    executions = ("eager", "eager" if context.dry_run else "graphs")
    for name, asked in PLANS.items():
        metric = f"{LAYERS} layers, {name}: prompts with equal tokens, eager and captured"
        if context.has(metric):
            continue
        eager, captured = (tokens(str(folder), context, asked, how) for how in executions)
        same = equal(eager, captured)
        context.emit(Row(metric, f"{same} of {len(eager)}", target="all", held=same == len(eager)))
        if same == len(eager):
            continue
        # Does one of them differ from itself, and do kernels that read no words differ, too?
        again = [tokens(str(folder), context, asked, how) for how in executions]
        with replaced(loaders, "_words", lambda weight: None):
            tiles = [tokens(str(folder), context, asked, how) for how in executions]
        found_again = {
            "eager twice": equal(eager, again[0]),
            "captured twice": equal(captured, again[1]),
            "without words, eager and captured": equal(*tiles),
        }
        context.emit(Row(f"{name}: equal of {len(eager)} when repeated", str(found_again)))
    shutil.rmtree(folder)


def equal(some: list[Tokens], others: list[Tokens]) -> int:
    """How many prompts have the same tokens in both."""
    return sum(a == b for a, b in zip(some, others, strict=True))


def tokens(folder: str, context: Context, overrides: list[str], execution: str) -> list[Tokens]:
    engine = EngineRun(folder, context.device, [*SMALL, *overrides, f"execution={execution}"])
    found = engine.generate([tuple(range(5, 30 + 9 * i)) for i in range(ROWS)], STEPS)
    engine.close()
    return found
