"""What a decode step costs beside the device: planning, launching and committing, by batch size.

    python tools/benchmarks/host_time.py [MODEL] [--batch 1 8 64] [--set "overlap=false ..."]

``gap`` is the wall time between two steps' results minus the time of forward, sampling and verification; ``host`` is
planning and committing alone. With ``overlap=true`` the host works while the device does, so only the gap counts.
Medians over steps in which every request decodes one token. One setting per process: two engines in one would run
their kernels from two threads, which on a CPU slows both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from engine import LLM
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams

PROMPT_TOKENS = 32
Step = tuple[float, StepEvent]
"""Seconds since the results of the step before, and what the step says of itself."""


def decode_steps(llm: LLM, batch: int, tokens: int) -> list[Step]:
    """Steps of ``batch`` requests with ``tokens`` outputs each, prompts and stragglers left out."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        prompt = tuple((i * 7 + j) % 1000 for j in range(PROMPT_TOKENS))
        llm.core.submit(EngineRequest(f"host-time-{batch}-{i}", prompt, sampling, cache_salt=str(i)))
    steps: list[Step] = []
    before = time.perf_counter()
    while llm.core.has_work:
        events = [event for event in llm.core.step().events if isinstance(event, StepEvent)]
        now = time.perf_counter()
        for event in events:
            if event.num_decode_tokens == event.num_requests == batch and event.num_prefill_tokens == 0:
                steps.append((now - before, event))
        before = now if events else before
    return steps


def report(batch: int, steps: Sequence[Step]) -> None:
    wall = statistics.median(seconds * 1e3 for seconds, _ in steps)
    device = statistics.median(event.device_ms for _, event in steps)
    gap = statistics.median(seconds * 1e3 - event.device_ms for seconds, event in steps)
    host = statistics.median(event.host_ms for _, event in steps)
    print(
        f"batch {batch:3}: step {wall:7.2f} ms, device {device:7.2f}, gap {gap:6.3f}, host {host:6.3f} "
        f"({len(steps)} steps)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--set", default="", metavar="'KEY=VALUE ...'", help="overrides")
    options = parser.parse_args()
    overrides = ["scheduler.max_requests=64", "drafter=none", "model.max_len=1024", *options.set.split()]
    llm = LLM(options.model, overrides=overrides)
    for batch in options.batch:
        decode_steps(llm, batch, 8)
        report(batch, decode_steps(llm, batch, options.tokens))
    llm.close()


if __name__ == "__main__":
    main()
