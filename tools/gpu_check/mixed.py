"""Mixed load with aborts against every preset: nothing stays held, and nothing is compiled or captured once ready."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from engine.contracts.request import SamplingParams
from gpu_check.engine_run import EngineRun, Tokens
from gpu_check.section import Context, Row

PRESETS = ("latency", "baseline", "throughput", "balanced")
AT_ONCE = 24


@dataclass(frozen=True, slots=True)
class Job:
    """One request; its client leaves after so many tokens."""

    prompt: Tokens
    sampling: SamplingParams
    leaves_after: int | None


@dataclass
class Late:
    """What happened after the engine was ready and must not."""

    compiled: list[str] = field(default_factory=list)
    captured: int = 0


def jobs(count: int, longest: int, seed: int) -> list[Job]:
    """Prompts of very unequal lengths, some after a shared beginning; greedy, sampled, filtered and penalised."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(100, 3000) for _ in range(600))
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0}, {"seed": 1}, {"top_k": 20, "top_p": 0.9, "seed": 2}, {"temperature": 0.0, "logprobs": 2},
        {"min_p": 0.05, "seed": 3}, {"repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 4},
    )  # fmt: skip
    made = []
    for i in range(count):
        length = min(longest, max(1, int(rng.lognormvariate(4.5, 1.6))))
        prompt = tuple(rng.randrange(100, 3000) for _ in range(length))
        prompt = (shared + prompt)[:longest] if i % 4 == 0 else prompt
        sampling = SamplingParams(max_tokens=rng.randint(1, 48), ignore_eos=i % 2 == 0, **kinds[i % len(kinds)])
        made.append(Job(prompt, sampling, rng.randint(1, 6) if i % 6 == 1 else None))
    return made


def run(context: Context) -> None:
    count, longest = (14, 60) if context.dry_run else (200, 3000)
    for preset in PRESETS[:1] if context.dry_run else PRESETS:
        load, late_ones = f"{preset}: mixed load", f"{preset}: compiled and captured after readiness"
        if context.has(load, late_ones):
            continue
        dtype = "float32" if context.dry_run else "bfloat16"
        engine = EngineRun("bundled", context.device, [f"+preset={preset}", f"model.dtype={dtype}"])
        with watched() as late:
            finished, aborted, errors = drive(engine, jobs(count, longest, seed=7))
        stats = engine.core.stats()
        held = stats.blocks_leased or stats.rows_used or stats.running or stats.waiting
        whole = all(blocks.free + blocks.cached == blocks.total for blocks in stats.blocks)
        done = f"{finished} finished, {aborted} aborted, {len(errors)} failed; {stats.blocks_leased} blocks held"
        context.emit(
            Row(load, done, target="all end, 0 held", detail=errors[:10],
                held=whole and not held and not errors and finished + aborted == count)
        )  # fmt: skip
        measured = f"{len(late.compiled)} and {late.captured}"
        nothing = not late.compiled and not late.captured
        context.emit(Row(late_ones, measured, target="0 and 0", held=nothing, detail=sorted(set(late.compiled))))
        engine.close()


def drive(engine: EngineRun, todo: list[Job]) -> tuple[int, int, list[str]]:
    """Run all, so many at once; returns how many finished, how many were aborted, and errors."""
    waiting, active = deque(todo), dict[str, tuple[Job, int]]()
    finished = aborted = 0
    errors: list[str] = []
    while waiting or active or engine.core.has_work:
        while waiting and len(active) < AT_ONCE:
            job = waiting.popleft()
            active[engine.submit(job.prompt, job.sampling)] = (job, 0)
        for out in engine.core.step().outputs:
            job, seen = active[out.request_id]
            seen += len(out.tokens)
            active[out.request_id] = (job, seen)
            if out.finish_reason is not None:
                finished += out.finish_reason in ("stop", "length")
                aborted += out.finish_reason == "abort"
                errors += [out.error] if out.error else []
                del active[out.request_id]
            elif job.leaves_after is not None and seen >= job.leaves_after:
                engine.core.abort([out.request_id])
    return finished, aborted, errors


@contextmanager
def watched() -> Iterator[Late]:
    """Notes every Triton kernel that is compiled and every CUDA graph that is captured inside this block."""
    late = Late()
    knobs, before = triton.knobs.runtime, triton.knobs.runtime.jit_post_compile_hook
    begin = torch.cuda.CUDAGraph.capture_begin

    def compiled(*args: Any, **kwargs: Any) -> Any:
        late.compiled.append(str(kwargs.get("repr", "a kernel")))
        return None if before is None else before(*args, **kwargs)

    def captured(*args: Any, **kwargs: Any) -> Any:
        late.captured += 1
        return begin(*args, **kwargs)

    try:
        knobs.jit_post_compile_hook = compiled
        torch.cuda.CUDAGraph.capture_begin = captured  # type: ignore[method-assign]
        yield late
    finally:
        knobs.jit_post_compile_hook = before
        torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign]
