"""Which kernels a decode step launches, how often, and how long each takes: the profiler's view of captured steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_check import floors
from gpu_check.engine_run import EngineRun
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import folder_of, shape_of
from gpu_check.speed import context_tokens, overrides

STEPS = 24
BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a step. The profiler keeps kernels from overlapping less than graphs do: times add up to more
    than a step takes."""

    name: str
    per_step: float
    us_each: float

    @property
    def us_per_step(self) -> float:
        return self.per_step * self.us_each


def run(context: Context) -> None:
    name = context.section.argument
    engine = EngineRun(folder_of(name, context.scratch), context.device, overrides(context.dry_run))
    for batch in BATCHES:
        launched = f"{name}: kernels and copies of a decode step, batch {batch}"
        summed_times = f"{name}: their time, one after another, batch {batch}"
        if context.has(launched, summed_times):
            continue
        engine.decode(batch, context_tokens(context.dry_run), STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            steps = len(engine.decode(batch, context_tokens(context.dry_run), STEPS))
            torch.cuda.synchronize()
        kernels = summed(found.events(), steps)
        launches, total = sum(k.per_step for k in kernels), sum(k.us_per_step for k in kernels)
        detail = [
            {"kernel": k.name, "per_step": round(k.per_step, 2), "us_each": round(k.us_each, 2),
             "share": round(k.us_per_step / total, 3)}
            for k in kernels
        ]  # fmt: skip
        context.emit(Row(launched, round(launches), detail=detail))
        work = floors.decode(shape_of(name, context.dry_run), batch, context_tokens(context.dry_run), weight=2.0)
        context.emit(time_row(summed_times, round(total / 1e3, 3), context.bars(work)))
    engine.close()


def summed(events: Iterable[Any], steps: int) -> list[KernelTime]:
    """Per name, the slowest in sum first. Prefill's kernels are in the recording: what occurs less than every other
    step is left out."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name[:100], []).append(event.device_time)
    kernels = [
        KernelTime(name, len(found) / steps, sorted(found)[len(found) // 2])
        for name, found in times.items()
        if len(found) >= steps / 2
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us_per_step)
