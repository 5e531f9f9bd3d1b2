"""ITL of rows that decode beside prompts whose beginning is loaded from memory, by how much of it a step copies.

    python tools/benchmarks/kv_loads.py MODEL [--tokens 3488] [--every 0.5] [--rounds 2] [--seconds 5]

In turns, in one engine of one thread without overlap, so that the CPU time of that thread is the clock: what else runs
on the machine does not count. Four rows decode; every so often a prompt comes that the pool has lost and memory has.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import replace
from itertools import count
from time import thread_time

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from engine.startup.build import build_engine

ROWS, PROMPTS = 4, 3
WARM_S = 0.5
WAYS = {"no loads": 0.0, "at once": math.inf, "16 MiB a step": 2.0**24, "8 MiB a step": 2.0**23}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
MANY = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)


class Load:
    """An engine with records of some prompts in memory."""

    def __init__(self, model: str, tokens: int) -> None:
        self._draw, self._numbers, self._tokens = random.Random(0), count(), tokens
        overrides = (
            *(f"model.path={model}", f"memory.kv_tokens={3 * tokens + 8000}", f"model.max_len={tokens + 600}"),
            *("exporter=[]", "threads=1", "overlap=false", "kv_store=[host]"),
        )
        self.core: EngineCore = build_engine(assemble([*overrides])).core
        self._prompts = [self._prompt(tokens + 1) for _ in range(PROMPTS)]
        for prompt in self._prompts:
            self._submit(prompt, ONE)
            self._drain()

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(3, 1000) for _ in range(length))

    def _submit(self, prompt: tuple[int, ...], sampling: SamplingParams) -> str:
        name = str(next(self._numbers))
        self.core.submit(EngineRequest(name, prompt, sampling))
        return name

    def _drain(self) -> None:
        while self.core.has_work:
            self.core.step()
        self.core.take_stored()

    def turn(self, most_bytes: float, every_s: float, seconds: float) -> tuple[list[float], list[float]]:
        """Times between tokens of rows that decode, and TTFT of prompts that are loaded; seconds. ``most_bytes``: that
        a step copies, 0: no such prompts come."""
        core = self.core
        core._planner._limits = replace(core._planner._limits, loaded_bytes=most_bytes)
        last = {self._submit(self._prompt(64), MANY): math.nan for _ in range(ROWS)}
        began = thread_time()
        due, came, gaps, firsts = began + WARM_S, dict[str, float](), list[float](), list[float]()
        while (now := thread_time()) - began < seconds:
            if most_bytes and now >= due and not came:
                core._pool.allocator.reset_cache()
                came[self._submit(self._draw.choice(self._prompts), ONE)] = now
                due = now + every_s
            for output in core.step().outputs:
                now, name = thread_time(), output.request_id
                if name in came:
                    assert output.timings is not None and output.timings.loaded_tokens > self._tokens - 32
                    firsts.append(now - came.pop(name))
                    continue
                before = last.pop(name)
                if before - began > WARM_S:
                    gaps.append(now - before)
                ended = output.finish_reason is not None
                last[self._submit(self._prompt(64), MANY) if ended else name] = math.nan if ended else now
        core.abort([*last, *came])
        self._drain()
        return gaps, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3488, help="that are loaded of each prompt")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two such prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    flags = parser.parse_args()
    load = Load(flags.model, flags.tokens)
    found = {way: (list[float](), list[float]()) for way in WAYS}
    for _ in range(flags.rounds):
        for way, most_bytes in WAYS.items():
            for into, new in zip(found[way], load.turn(most_bytes, flags.every, flags.seconds), strict=True):
                into += new
    for way, (gaps, firsts) in found.items():
        at = [1e3 * statistics.quantiles(gaps, n=100)[percent - 1] for percent in (50, 95, 99)]
        ttft = f", TTFT of {len(firsts)} loaded prompts {1e3 * statistics.median(firsts):.0f} ms" if firsts else ""
        print(f"{way:15} ITL P50 {at[0]:.1f}, P95 {at[1]:.1f}, P99 {at[2]:.1f} ms ({len(gaps)}){ttft}")
    load.core.close()


if __name__ == "__main__":
    main()
