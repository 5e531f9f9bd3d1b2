"""Several ranks on the card: the bundled model's greedy tokens in float32, against one rank's on a CPU.

On one card all ranks are threads of one process. Where there are more cards, NCCL moves tensors between them, with
captured steps, too.
"""

from __future__ import annotations

import traceback

import torch

from gpu_check.engine_run import EngineRun
from gpu_check.laws import COUNT, LIMITS, make_prompts, margin
from gpu_check.section import Context, Row

LAYOUTS = (("tp=2",), ("tp=4",), ("pp=2",), ("tp=2", "pp=2"), ("tp=4", "dcp=2"))
IN_THREADS = ("parallelism=threads", "communicator=simulated", "parallelism.share_devices=true")
TIE = 1e-3
"""Nats between two tokens that sums in another order may exchange."""


def run(context: Context) -> None:
    count = 8 if context.dry_run else COUNT
    reference = EngineRun("bundled", "cpu", ["+preset=baseline", "model.dtype=float32", *LIMITS])
    prompts = make_prompts(reference.plan.model.path)[: 3 if context.dry_run else None]
    want = reference.generate(prompts, count, together=False)
    for layout in LAYOUTS[:1] if context.dry_run else LAYOUTS:
        for how, overrides in ways(context.device, num_ranks(layout)):
            name = f"{' '.join(layout)}, {how}: tokens that differ from one rank's"
            if context.has(name):
                continue
            asked = [f"parallelism.{size}" for size in layout]
            try:
                ranks = EngineRun("bundled", context.device, [*asked, *overrides, "model.dtype=float32", *LIMITS])
                got = ranks.generate(prompts, count)
                ranks.close()
            except Exception as problem:
                traceback.print_exc()
                context.emit(Row(name, held=False, detail=f"{type(problem).__name__}: {problem}"[:300]))
                continue
            margins = [margin(reference, p, a, b) for p, a, b in zip(prompts, got, want, strict=True) if a != b]
            held = all(found <= TIE for found in margins)
            context.emit(Row(name, len(margins), f"of {len(got)} outputs", target="near-ties alone", held=held))
    reference.close()


def num_ranks(layout: tuple[str, ...]) -> int:
    found = 1
    for size in layout:
        name, _, number = size.partition("=")
        found *= 1 if name == "dcp" else int(number)
    return found


def ways(device: str, ranks: int) -> list[tuple[str, tuple[str, ...]]]:
    """How so many ranks can run here."""
    found: list[tuple[str, tuple[str, ...]]] = [("threads on one device", (*IN_THREADS, "execution=eager"))]
    if device == "cuda":
        found.append(("threads on one card, compiled", (*IN_THREADS, "execution=compile")))
        if torch.cuda.device_count() >= ranks:
            found += [(f"nccl, {execution}", (f"execution={execution}",)) for execution in ("compile", "graphs")]
            found.append(("symmetric, graphs", ("communicator=symmetric", "execution=graphs")))
    return found
