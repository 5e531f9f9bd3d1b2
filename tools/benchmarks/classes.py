"""What classes of requests (``slo.classes``) are worth under overload, on a virtual clock.

    python -m tools.benchmarks.classes [--load 3] [--seconds 120] [--seeds 3]

One simulated engine: 8 ms and 0.03 ms a token for a step, 512 tokens a step, 64 rows, ``server.max_queue`` 256. Three
classes come at random moments: ``code`` (first token in 100 ms; a fifth of the tokens), ``chat`` (500 ms; three
tenths), ``batch`` (30 s; half). A load of 3 is three times the requests that the engine ends a second when all of them
come at once. Policies:

* ``fcfs``: no classes.
* ``priority``: code before chat before batch.
* ``classes``: by due time; who is late makes way for 10 s.
* ``refuse``: the same, and requests whose first token is expected too late are answered 429.
* ``cancel``: as ``classes``, and requests whose first token is late are ended.
* ``both``: refused and ended.

A request is good if its first token came in time; goodput is good requests a second. What was refused though it could
have been served is counted beside the same policy without refusals: those of the refused ones that are in time there.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from engine.contracts.percentiles import percentiles
from engine.contracts.step_cost import StepCost
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import EngineSpec, Overheads
from engine_lab.shared.simulation.trace import TraceRequest

TARGETS_MS = {"code": 100.0, "chat": 500.0, "batch": 30_000.0}
SHAPES = {"code": (64, 256, 24), "chat": (128, 768, 64), "batch": (512, 1536, 96)}
"""Fewest and most prompt tokens, output tokens."""
SHARES = {"code": 0.2, "chat": 0.3, "batch": 0.5}
"""Of the tokens."""
MAX_QUEUE = 256
OVERRIDES = ("exporter=[]", "scheduler.max_requests=64", "scheduler.token_budget=512", "model.max_len=4096")
CLASSES = tuple(f"slo.classes.{name}.ttft_ms={ms:.0f}" for name, ms in TARGETS_MS.items())
REFUSED = tuple(f"slo.classes.{name}.refuse_late=true" for name in TARGETS_MS)
CANCELLED = tuple(f"slo.classes.{name}.cancel_late=true" for name in TARGETS_MS)
POLICIES = {
    "fcfs": (),
    "priority": (),
    "classes": CLASSES,
    "refuse": (*CLASSES, *REFUSED),
    "cancel": (*CLASSES, *CANCELLED),
    "both": (*CLASSES, *CANCELLED, *REFUSED),
}


WITHOUT = {"refuse": "classes", "both": "cancel"}
"""The same without refusals."""


def spec(overrides: Sequence[str]) -> EngineSpec:
    plan = resolve((*OVERRIDES, *overrides)).plan
    return EngineSpec(plan, 1 + 65_536 // plan.block_size, StepCost(8.0, 0.03, 1), Overheads(1.0, 1.0, 0.5))


def trace(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Requests per second in all; each class has the same share of the tokens."""
    rng = random.Random(seed)
    size = {name: (low + high) / 2 + output for name, (low, high, output) in SHAPES.items()}
    weights = [SHARES[name] / size[name] for name in SHAPES]
    found, now = [], 0.0
    while True:
        now += rng.expovariate(rate)
        if now > seconds:
            return found
        (name,) = rng.choices(list(SHAPES), weights)
        low, high, output = SHAPES[name]
        found.append(TraceRequest(now, rng.randint(low, high), output, service_class=name))


def capacity(one: EngineSpec, seed: int) -> float:
    """Requests a second that end while the middle half of them does, when all come at once."""
    at_once = [replace(request, arrival_s=0.0) for request in trace(20.0, 30.0, seed)]
    ended = sorted(request.e2e_ms / 1e3 for request in simulate(at_once, [one]).requests)
    first, last = len(ended) // 4, len(ended) * 3 // 4
    return (last - first) / (ended[last] - ended[first])


def prioritised(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    order = list(TARGETS_MS)
    return [replace(request, priority=order.index(request.service_class)) for request in requests]


def good(outcome: Outcome, name: str) -> list[bool]:
    return [not r.error and r.ttft_ms <= TARGETS_MS[name] for r in outcome.requests if r.service_class == name]


def errors_ms(outcome: Outcome) -> list[float]:
    return [abs(r.expected_ttft_ms - r.ttft_ms) for r in outcome.requests if r.expected_ttft_ms is not None]


def wrongly_refused(outcome: Outcome, unrefused: Outcome) -> tuple[int, int]:
    """Refused since they were expected too late, and of these in time where nobody is refused so."""
    pairs = [(a, b) for a, b in zip(outcome.requests, unrefused.requests, strict=True) if "expected" in a.error]
    return len(pairs), sum(not b.error and b.ttft_ms <= TARGETS_MS[b.service_class] for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    specs = {name: spec(overrides) for name, overrides in POLICIES.items()}
    print("| policy | good/s | code | chat | batch | longest wait of batch (s) | refused | though servable |")
    print("|---|---|---|---|---|---|---|---|")
    rates = [flags.load * capacity(specs["fcfs"], seed) for seed in range(flags.seeds)]
    found: dict[str, list[Outcome]] = {}
    for name, one in specs.items():
        for seed, rate in enumerate(rates):
            requests = trace(rate, flags.seconds, seed)
            outcome = simulate(prioritised(requests) if name == "priority" else requests, [one], max_queue=MAX_QUEUE)
            found.setdefault(name, []).append(outcome)
        print(row(name, found, flags.seconds), flush=True)
    for name in list(POLICIES)[2:]:
        errors = [(ms, 1) for outcome in found[name] for ms in errors_ms(outcome)]
        p50, p90 = percentiles(errors, (50, 90))
        print(f"\n{name}: error of the predicted TTFT P50 {p50:.0f}, P90 {p90:.0f} ms of {len(errors)}", end="")
    print()


def row(name: str, found: dict[str, list[Outcome]], seconds: float) -> str:
    outcomes = found[name]
    goods = {each: [flag for outcome in outcomes for flag in good(outcome, each)] for each in TARGETS_MS}
    rate = sum(map(sum, goods.values())) / seconds / len(outcomes)
    shares = " | ".join(f"{statistics.fmean(flags):.1%}" for flags in goods.values())
    batch = [r for outcome in outcomes for r in outcome.requests if r.service_class == "batch" and not r.error]
    longest = max((r.ttft_ms for r in batch), default=0.0) / 1e3
    counts = [
        wrongly_refused(a, b) for a, b in zip(outcomes, found.get(WITHOUT.get(name, name), outcomes), strict=True)
    ]
    refused, wrongly = (sum(pair[i] for pair in counts) for i in (0, 1))
    return f"| {name} | {rate:.1f} | {shares} | {longest:.1f} | {refused} | {wrongly} |"


if __name__ == "__main__":
    main()
