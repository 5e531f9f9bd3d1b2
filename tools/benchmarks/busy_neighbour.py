"""Two source trees beside each other: latency on cores of their own, and beside a process that never waits.

    python tools/benchmarks/busy_neighbour.py BEFORE AFTER [--model "bundled" --model "/path/to/model quantizer=int8"]

BEFORE and AFTER are checkouts. Every engine stays resident in a process of its own and they take turns, in another
order each round: AFTER, BEFORE, and BEFORE with the two settings that help it on shared cores, ``threads=1`` and
``GOMP_SPINCOUNT=5000``. TTFT is that of a prompt of 128 tokens, TPOT that of one request alone; "eight" is how long
eight requests at once take, of 32 tokens each. Quiet, AFTER is compared with BEFORE; beside a busy process with the
best of all three of BEFORE. Ratios are of medians over the rounds, with 95 % intervals (bootstrap over rounds). With
``--first`` engines and neighbours share the cores among themselves alone, whoever else computes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

BEFORE, AFTER = "before", "after"
SETTINGS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    AFTER: ((), {}),
    BEFORE: ((), {}),
    "before threads=1": (("threads=1",), {}),
    "before GOMP_SPINCOUNT=5000": ((), {"GOMP_SPINCOUNT": "5000"}),
}
"""Overrides and environment of each contestant."""
MEASURES = ("TTFT", "TPOT", "eight")
COMMON = ("device=cpu", "model.max_len=2048", "memory.kv_tokens=8192")
BUSY = "while True: pass"
RESAMPLES = 2000
Times = dict[str, dict[str, list[float]]]
"""Milliseconds by contestant and measure, a round each."""


@dataclass(frozen=True, slots=True)
class Engine:
    process: subprocess.Popen[str]

    def measured(self) -> dict[str, float]:
        """Milliseconds by measure."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("measure\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))


@contextmanager
def started(tree: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> Iterator[Engine]:
    """An engine of a source tree in a process of its own, ready."""
    paths = os.pathsep.join(str(tree / part) for part in ("core", "plugins"))
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *overrides],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.strip() == str(tree / "core"), f"expected an engine of {tree}, found {ready!r}"
        yield Engine(process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def go_first() -> None:
    """This process and those it starts get nearly all of the processors, and share them as equals."""
    if os.getpgrp() != os.getpid():
        os.setsid()  # the kernel's groups of processes, where it has any, are sessions
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text("-20")
    os.nice(-20)


def child(overrides: Sequence[str]) -> None:
    """Measures once for every line of the input."""
    import engine
    from engine import LLM

    llm = LLM(overrides=[*overrides, *COMMON])
    numbers = count()

    def run(requests: int, prompt: int, tokens: int) -> Any:
        starts = [next(numbers) for _ in range(requests)]
        prompts = [[(start * 7 + i * 3) % 1000 for i in range(prompt)] for start in starts]
        return llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_salt=str(starts[0]))

    run(1, 128, 32)
    print(Path(engine.__file__).parents[1], flush=True)
    for _ in sys.stdin:
        first = run(1, 128, 1)[0].timings
        alone = run(1, 16, 33)[0].timings
        eight = [one.timings for one in run(8, 32, 17)]
        print(json.dumps({
            "TTFT": first.queue_ms + first.prefill_ms,
            "TPOT": alone.decode_ms / 32,
            "eight": max(one.queue_ms + one.prefill_ms + one.decode_ms for one in eight),
        }), flush=True)  # fmt: skip


def rounds(engines: Mapping[str, Engine], number: int, rng: random.Random) -> Times:
    times: Times = {name: {measure: [] for measure in MEASURES} for name in engines}
    for round_number in range(number + 1):
        for name in rng.sample(list(engines), len(engines)):
            found = engines[name].measured()
            if round_number > 0:  # the first round warms up
                for measure in MEASURES:
                    times[name][measure].append(found[measure])
    return times


def ratio(after: Sequence[float], before: Sequence[float], rng: random.Random) -> tuple[float, float, float]:
    """Of the medians, with its interval."""
    pairs = list(zip(after, before, strict=True))

    def of(chosen: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen)

    found = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return of(pairs), found[RESAMPLES // 40], found[-RESAMPLES // 40]


def report(title: str, times: Times, rivals: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Print a table; what it shows, as data."""
    print(f"\n{title}, ms: medians [range]\n\n| | {' | '.join(MEASURES)} |\n|---|---|---|---|")
    for name, of in times.items():
        cells = (f"{statistics.median(ms):.1f} [{min(ms):.1f}, {max(ms):.1f}]" for ms in map(of.get, MEASURES) if ms)
        print(f"| {name} | {' | '.join(cells)} |")
    ratios = {}
    for measure in MEASURES:
        best = min(rivals, key=lambda name: statistics.median(times[name][measure]))
        value, low, high = ratio(times[AFTER][measure], times[best][measure], rng)
        ratios[measure] = {"to": best, "ratio": value, "low": low, "high": high}
    cells = (f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}] of {one['to']}" for one in ratios.values())
    print(f"| **ratio** | {' | '.join(cells)} |", flush=True)
    return {"title": title, "ms": times, "ratios": ratios}


def main() -> None:
    from quiet import first_in_line  # needs an engine, and children have that of another tree

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", action="append", metavar="'MODEL [OVERRIDE ...]'", help="repeat for more")
    parser.add_argument("--rounds", type=int, default=20, help="after one that warms up (%(default)s)")
    parser.add_argument("--neighbours", type=int, nargs="*", default=[0, 1], help="busy processes (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all times and ratios")
    parser.add_argument("--first", action="store_true", help="before all other processes, neighbours like engines")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.first:
        go_first()
    rng, found = random.Random(options.seed), []
    for model in options.model or ["bundled"]:
        path, *overrides = model.split()
        with ExitStack() as stack:
            engines = {}
            for name, (extra, environment) in SETTINGS.items():
                tree = (options.after if name == AFTER else options.before).resolve()
                words = [f"model.path={path}", *overrides, *extra]
                engines[name] = stack.enter_context(started(tree, words, environment))
            for number in options.neighbours:
                rivals = [name for name in engines if name != AFTER] if number else [BEFORE]
                pids = [engine.process.pid for engine in engines.values()] if options.first and not number else []
                with neighbours(number), first_in_line(pids):
                    times = rounds(engines, options.rounds, rng)
                found.append(report(f"{model}, {number} busy neighbours", times, rivals, rng))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
