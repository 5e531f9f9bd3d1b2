"""Decode of Llama-3.1-8B's shape in 8- and 4-bit weights, against reading what the engine then holds."""

from __future__ import annotations

import statistics

from gpu_check import floors
from gpu_check.engine_run import EngineRun
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import folder_of, shape_of
from gpu_check.speed import DECODED, batches, context_tokens, overrides

PLANS = {
    "int4": (0.5 + 4.0 / 128, ["quantizer=int4", "kv_format=native"]),
    "fp8": (1.0, ["quantizer=fp8", "kv_format=fp8"]),
    "int8": (1.0, ["quantizer=int8", "kv_format=int8"]),
}
"""Bytes per weight, scales included, and what is asked for. The head is int8 in all."""
LEAST_SHARE = {"fp8": 0.75, "int4": 0.65}


def run(context: Context) -> None:
    name = context.section.argument
    shape, folder = shape_of(name, context.dry_run), folder_of(name, context.scratch)
    for plan, (per_weight, asked) in PLANS.items():
        metrics = {batch: f"{name} {plan}: decode, batch {batch}" for batch in batches(context.dry_run)}
        if context.has(*metrics.values()):
            continue
        engine = EngineRun(folder, context.device, [*overrides(context.dry_run), *asked])
        context.emit(Row(f"{name} {plan}: engine built", round(engine.build_s, 1), "s"))
        per_key = 2 if asked[1].endswith("native") else 1
        for batch, metric in metrics.items():
            steps = [engine.decode(batch, context_tokens(context.dry_run), DECODED) for _ in range(2)][-1]
            ms = statistics.median(step.wall_ms for step in steps)
            tokens = context_tokens(context.dry_run) + DECODED // 2
            work = floors.decode(shape, batch, tokens, weight=per_weight, head=1.0, kv=per_key)
            least = LEAST_SHARE.get(plan) if batch == 1 else None
            context.emit(time_row(metric, ms, context.bars(work), least_share=least))
        engine.close()
