"""ITL of rows that decode beside prompts whose beginning is loaded from memory, by how much of it a step copies.

    python tools/benchmarks/kv_loads.py MODEL [--tokens 3488] [--every 0.5] [--rounds 2] [--seconds 5]

In turns, in one engine of one thread without overlap, so that the CPU time of that thread is the clock: what else runs
on the machine does not count. Four rows decode; every so often a prompt comes that the pool has lost and memory has.
Beside it: no such prompts, the same prompts found in the pool, which is what they cost without loads, and no prompts
but another process that copies as many bytes a second, which is what the memory bus costs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from itertools import count
from time import thread_time

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from engine.startup.build import build_engine

ROWS, PROMPTS = 4, 3
WARM_S = 0.5
COPY_S = 0.01
"""Between two copies of the other process."""
IDLE, COPY, POOL, ENGINE = "no such prompts", "a process copies", "found in the pool", "loaded, as it is"
BOUNDS = {"loaded at once": math.inf, "16 MiB a step": 2.0**24}
WAYS = (IDLE, COPY, POOL, ENGINE, *BOUNDS)
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
MANY = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)


class Load:
    """An engine with records of some prompts in memory."""

    def __init__(self, model: str, tokens: int) -> None:
        self._draw, self._numbers, self._tokens = random.Random(0), count(), tokens
        overrides = (
            *(f"model.path={model}", f"memory.kv_tokens={(PROMPTS + 1) * tokens + 8000}"),
            *(f"model.max_len={tokens + 600}", "exporter=[]", "threads=1", "overlap=false", "kv_store=[host]"),
        )
        self.core: EngineCore = build_engine(assemble([*overrides])).core
        assert self.core._pool.tiers is not None
        self._bound = self.core._pool.tiers.load_bound
        self._measured: Callable[[float], float] = self._bound.most_bytes
        self._prompts = [self._prompt(tokens + 1) for _ in range(PROMPTS)]
        for prompt in self._prompts:
            self._submit(prompt, ONE)
            self._drain()
        stored = self.core.stats().stores[0]
        self.prompt_bytes = stored.num_bytes // PROMPTS

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

    def turn(self, way: str, every_s: float, seconds: float) -> tuple[list[float], list[float]]:
        """Times between tokens of rows that decode, and TTFT of the prompts that come; seconds."""
        core, bound = self.core, BOUNDS.get(way)
        self._bound.most_bytes = self._measured if bound is None else lambda step_ms: bound  # type: ignore[method-assign]
        if way == POOL:
            for prompt in self._prompts:
                self._submit(prompt, ONE)
                self._drain()
        last = {self._submit(self._prompt(64), MANY): math.nan for _ in range(ROWS)}
        began = thread_time()
        due, came, gaps, firsts = began + WARM_S, dict[str, float](), list[float](), list[float]()
        while (now := thread_time()) - began < seconds:
            if way not in (IDLE, COPY) and now >= due and not came:
                if way != POOL:
                    core._pool.allocator.reset_cache()
                came[self._submit(self._draw.choice(self._prompts), ONE)] = now
                due = now + every_s
            for output in core.step().outputs:
                now, name = thread_time(), output.request_id
                if name in came:
                    assert output.timings is not None
                    assert way == POOL or output.timings.loaded_tokens > self._tokens - 32
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


def copy_at(bytes_s: float) -> None:
    """Copy so much a second, for ever."""
    piece = int(bytes_s * COPY_S)
    size = max(1, (1 << 28) // piece) * piece
    source, target = memoryview(bytearray(b"\1") * size), memoryview(bytearray(size))
    due = time.monotonic()
    while True:
        for at in range(0, size, piece):
            target[at : at + piece] = source[at : at + piece]
            due = max(due + COPY_S, time.monotonic() - COPY_S)
            time.sleep(max(0.0, due - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3488, help="that are loaded of each prompt")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two such prompts, at least")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    flags = parser.parse_args()
    load = Load(flags.model, flags.tokens)
    asked = load.prompt_bytes / flags.every
    found = {way: (list[float](), list[float]()) for way in WAYS}
    for round_ in range(flags.rounds):
        for way in WAYS[:: -1 if round_ % 2 else 1]:
            copier = multiprocessing.get_context("spawn").Process(target=copy_at, args=(asked,), daemon=True)
            if way == COPY:
                copier.start()
                time.sleep(1.0)
            for into, new in zip(found[way], load.turn(way, flags.every, flags.seconds), strict=True):
                into += new
            if way == COPY:
                copier.kill()
                copier.join()
    print(f"a prompt: {load.prompt_bytes / 1e6:.1f} MB; asked for: {asked / 1e6:.0f} MB/s")
    idle: list[float] = []
    for way, (gaps, firsts) in found.items():
        at = [1e3 * statistics.quantiles(gaps, n=100)[percent - 1] for percent in (50, 95, 99)]
        idle = idle or at
        three = zip((50, 95, 99), at, idle, strict=True)
        beside = " ".join(f"P{percent} {ms:.1f} ({ms / base:.2f})" for percent, ms, base in three)
        rate = len(firsts) * load.prompt_bytes / flags.rounds / (flags.seconds - WARM_S) / 1e6
        ttft = f", {len(firsts)} prompts, {rate:.0f} MB/s, TTFT {1e3 * statistics.median(firsts):.0f}" if firsts else ""
        print(f"{way:18} ITL, ms (of idle): {beside}, {len(gaps)} tokens{ttft}")
    load.core.close()


if __name__ == "__main__":
    main()
