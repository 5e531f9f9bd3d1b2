"""Cold and warm start of an engine process, phase by phase.

    python tools/benchmarks/start_up.py [MODEL] [--set "+preset=latency ..."] [--rounds 2]

Cold: kernel caches are empty folders (``XDG_CACHE_HOME`` and ``TRITON_CACHE_DIR`` point at new ones). Warm: the same
plan again with the caches the cold start filled. The checkpoint's pages stay in the system's cache in both, unless
somebody drops them. Several rounds, cold and warm in turns; medians are reported, and the ratio of the totals.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan
from engine.startup.memory.report import size
from engine.startup.process import ProcessEngineClient

Seconds = dict[str, float]
PROCESS = "start of the process, and what lies between"


async def start(plan: EnginePlan) -> Seconds:
    """One start in a process of its own: seconds by phase, in order, and the whole under ``total``."""
    client = ProcessEngineClient(plan)
    began = time.monotonic()
    info = await client.start()
    total = time.monotonic() - began
    await client.close()
    phases = {phase.name: phase.seconds for phase in info.phases}
    return {PROCESS: total - sum(phases.values()), **phases, "total": total}


def starts(plan: EnginePlan, rounds: int) -> tuple[list[Seconds], list[Seconds], int]:
    """Cold ones, warm ones, and the bytes of caches a cold one leaves."""
    cold, warm, cached = [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="engine-start-") as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
            cold.append(asyncio.run(start(plan)))
            warm.append(asyncio.run(start(plan)))
            cached = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return cold, warm, cached


def median(runs: list[Seconds], name: str) -> float:
    return statistics.median(run.get(name, 0.0) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--set", default="", metavar="'KEY=VALUE ...'", help="overrides")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    plan = assemble([f"model.path={options.model}", *options.set.split()])
    cold, warm, cached = starts(plan, options.rounds)
    print(f"{plan.model.name} on {plan.device.kind}, {plan.dtype}, {plan.execution}; seconds, medians of {len(cold)}")
    print(f"  {'phase':<46}{'cold':>8}{'warm':>8}")
    for name in cold[0]:
        print(f"  {name:<46}{median(cold, name):8.2f}{median(warm, name):8.2f}")
    ratio = median(cold, "total") / median(warm, "total")
    print(f"  a warm start is {ratio:.1f} times as fast; caches hold {size(cached)}")


if __name__ == "__main__":
    main()
