"""How well step times are predicted one step ahead: by tokens alone, and by the terms of the engine's step cost.

    python -m tools.benchmarks.step_cost record FILE [MODEL] [OVERRIDE ...]
    python -m tools.benchmarks.step_cost compare FILE [FILE ...]

``record`` runs three workloads (short chats; decodes after long contexts, 1 to 8 at once; long prompts beside decodes)
and writes what every step computed and how long it took. ``compare`` asks each model for every step before it sees it:
median and P90 of the absolute error, as a share of the step, the first ``SKIPPED`` steps of a workload apart. Nothing
else is to run meanwhile on the processor that records.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from engine import LLM
from engine.contracts.events import StepEvent
from engine.contracts.percentiles import percentiles
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.step_cost import StepWork
from engine.loop.step_cost import StepCostModel

SKIPPED = 20
SECONDS = 45.0
"""Longest that a workload runs."""
SETTINGS = ("drafter=none", "scheduler.itl_target_ms=0", "scheduler.token_budget=256", "scheduler.max_requests=8")


class Sample(msgspec.Struct):
    workload: str
    work: StepWork
    ms: float
    gap_ms: float
    captured: bool


class Arrival(msgspec.Struct):
    step: int
    prompt: int
    output: int


def workloads(max_len: int) -> dict[str, list[Arrival]]:
    """Requests by the number of the step before which they come."""
    rng, longest = random.Random(1), max_len - 200
    chat = [Arrival(i * 12, rng.randint(16, 200), rng.randint(20, 80)) for i in range(60)]
    contexts = [Arrival(i * 40, rng.randint(min(512, longest // 2), longest), 150) for i in range(8)]
    mixed = [Arrival(0, 64, 600) for _ in range(4)]
    mixed += [Arrival(30 + i * 40, rng.randint(longest // 3, longest * 3 // 4), 8) for i in range(10)]
    return {"short chat": chat, "long contexts": contexts, "mixed": mixed}


def steps_of(llm: LLM, arrivals: list[Arrival], name: str) -> Iterator[StepEvent]:
    rng, step, begun = random.Random(2), 0, time.monotonic()
    waiting = sorted(arrivals, key=lambda each: each.step)
    while (waiting or llm.core.has_work) and time.monotonic() - begun < SECONDS:
        while waiting and (waiting[0].step <= step or not llm.core.has_work):
            each = waiting.pop(0)
            prompt = tuple(rng.randrange(3, 1000) for _ in range(each.prompt))
            sampling = SamplingParams(max_tokens=each.output, temperature=0.0, ignore_eos=True)
            llm.core.submit(EngineRequest(f"{name}-{len(waiting)}", prompt, sampling))
        step += 1
        yield from (event for event in llm.core.step().events if isinstance(event, StepEvent))
    for each in range(len(arrivals)):
        llm.core.abort([f"{name}-{each}"])
    while llm.core.has_work:
        llm.core.step()


def record(file: Path, model: str, overrides: list[str]) -> None:
    llm = LLM(model, overrides=[*SETTINGS, *overrides])
    encode = msgspec.json.encode
    with file.open("wb") as out:
        for name, arrivals in workloads(llm.plan.max_len).items():
            for event in steps_of(llm, arrivals, name):
                work = StepWork(
                    event.num_requests,
                    event.num_prefill_tokens + event.num_decode_tokens,
                    event.decode_context,
                    event.prefill_context,
                    event.drafted,
                )
                sample = Sample(name, work, event.device_ms, event.gap_ms, event.captured)
                out.write(encode(sample) + b"\n")
    llm.close()


def by_tokens(work: StepWork) -> StepWork:
    """All that a fit of ``base + per_token * num_tokens`` sees."""
    return StepWork(num_tokens=work.num_tokens)


def without(term: str) -> Callable[[StepWork], StepWork]:
    """All but one number."""
    return lambda work: replace(work, **{term: 0})


SEEN: dict[str, Callable[[StepWork], StepWork]] = {
    "tokens": by_tokens,
    "all terms": lambda work: work,
    **{f"no {term}": without(term) for term in ("num_rows", "decode_context", "prefill_context")},
}


def compare(file: Path) -> None:
    samples = [msgspec.json.decode(line, type=Sample) for line in file.read_bytes().splitlines()]
    print(f"{file.name}: absolute error, % of the step: median / P90")
    for seen, features in SEEN.items():
        model, errors, number = StepCostModel(), defaultdict[str, list[tuple[float, int]]](list), Counter[str]()
        for sample in samples:
            work = features(sample.work)
            number[sample.workload] += 1
            if number[sample.workload] > SKIPPED:
                errors[sample.workload].append((100 * abs(model.cost().ms(work) / sample.ms - 1), 1))
            model.observe(work, sample.ms, sample.gap_ms)
        found = {name: percentiles(of, (50, 90)) for name, of in errors.items()}
        told = "; ".join(f"{name} {p50:.1f} / {p90:.1f} ({number[name]})" for name, (p50, p90) in found.items())
        print(f"  {seen:20} {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("model", nargs="?", default="bundled")
    recording.add_argument("overrides", nargs="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs="+")
    flags = parser.parse_args()
    if flags.command == "record":
        record(flags.file, flags.model, flags.overrides)
    else:
        for file in flags.files:
            compare(file)


if __name__ == "__main__":
    main()
