"""Which router wins on which load: simulated engines behind the real routers, on a virtual clock.

    python -m tools.benchmarks.routers [--engines 8] [--requests 1200] [--seeds 3] [--loads 0.5,0.9] [--faults]

The workloads: ``shared`` (prompts of 24 kinds with a beginning of 1,024 tokens each, some far more frequent than
others), ``hot`` (one beginning of 1,024 tokens for all), ``chat`` (conversations whose prompts are all that was said
before), ``agents`` (such with the tools of 4 kinds before, turns and answers that are short and soon) and ``unique``
(nothing is shared). A load is a share of the rate at which round robin ends the middle half of
the trace when all of it comes at once. An engine: 12 ms and 0.12 ms a token for a step, 1,024 tokens a step, 32 rows,
24,576 tokens of KV. ``longest_prefix`` is the prefix router without its count of load: the longest match wins. A cell
is the mean over the seeds. Nothing here runs a model; two cores cannot show what eight engines gain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.assembly.bind import build_context
from engine.contracts.percentiles import percentiles
from engine.contracts.router import ApiRequest, EngineView, Route
from engine.contracts.step_cost import StepCost
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import resolve
from engine_lab.shared.simulation.run import router_of, simulate
from engine_lab.shared.simulation.spec import EngineSpec, Overheads, slower
from engine_lab.shared.simulation.trace import TraceRequest
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

BLOCK, KV_TOKENS = 16, 24_576
OVERRIDES = ("exporter=[]", "scheduler.max_requests=32", "scheduler.token_budget=1024", "model.max_len=4096")
COST = StepCost(12.0, 0.12, 1)
ROUTERS = ("round_robin", "least_load", "longest_prefix", "prefix")
TIES = 0.05
"""The prefix router should be within this of the best one."""


class LongestPrefix(PrefixRouter):
    """Sends every request where most of it is cached, whatever the engine has to do."""

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        idle = tuple([replace(engine, sequences=0, queued_tokens=0, running_tokens=0) for engine in fleet])
        return super().place(request, idle)


# Workloads ------------------------------------------------------------------------------------------------------------


def shared(rng: random.Random, count: int, kinds: int = 24) -> list[TraceRequest]:
    """Kinds as frequent as 1, 1/2, 1/3 and so on."""
    weights = [1 / (kind + 1) for kind in range(kinds)]
    trace = []
    for i in range(count):
        (kind,) = rng.choices(range(kinds), weights)
        beginning = tuple([kind * 1000 + block for block in range(64)])
        prompt = 1024 + rng.randint(32, 256)
        trace.append(TraceRequest(0.0, prompt, length(rng), (*beginning, *own(i, prompt // BLOCK - 64)), BLOCK))
    return trace


def hot(rng: random.Random, count: int) -> list[TraceRequest]:
    return shared(rng, count, kinds=1)


def chat(rng: random.Random, count: int, turns: int = 6) -> list[TraceRequest]:
    """Each turn comes some seconds after the answer before it."""
    trace: list[TraceRequest] = []
    for talk in range(count // turns):
        said, after = rng.randint(200, 800), ()
        for turn in range(turns):
            output, name = length(rng), f"{talk}.{turn}"
            hashes = own(talk, (said + output) // BLOCK + 1)
            trace.append(TraceRequest(0.0, said, output, hashes, BLOCK, request_id=name, after=after))
            said, after = said + output + rng.randint(20, 200), (name,)
    return [replace(r, arrival_s=rng.expovariate(0.25)) if r.after else r for r in trace]


def agents(rng: random.Random, count: int, turns: int = 10, kinds: int = 4) -> list[TraceRequest]:
    """Each has the tools of its kind first; a turn is what a tool said, and comes soon after the call before it."""
    trace: list[TraceRequest] = []
    for run in range(count // turns):
        kind, said, after = rng.randrange(kinds), 1024 + rng.randint(50, 200), ()
        beginning = tuple([kind * 1000 + block for block in range(64)])
        for turn in range(turns):
            output, name = length(rng) // 3 + 1, f"{run}.{turn}"
            hashes = (*beginning, *own(run, (said + output) // BLOCK - 63))
            trace.append(TraceRequest(0.0, said, output, hashes, BLOCK, request_id=name, after=after))
            said, after = said + output + rng.randint(40, 150), (name,)
    return [replace(r, arrival_s=rng.expovariate(2.0)) if r.after else r for r in trace]


def unique(rng: random.Random, count: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, rng.randint(200, 1200), length(rng)) for _ in range(count)]


def length(rng: random.Random) -> int:
    return min(300, max(4, round(80 * rng.lognormvariate(0.0, 0.6))))


def own(request: int, blocks: int) -> tuple[int, ...]:
    return tuple([1_000_000 + request * 1000 + block for block in range(blocks)])


WORKLOADS: dict[str, Callable[[random.Random, int], list[TraceRequest]]] = {
    "shared": shared,
    "hot": hot,
    "chat": chat,
    "agents": agents,
    "unique": unique,
}


def arriving(trace: Sequence[TraceRequest], rate: float, seed: int) -> list[TraceRequest]:
    """``rate``: requests a second in all, of which those that wait for none come at random moments."""
    rng, now, found = random.Random(f"{seed}/arrivals"), 0.0, []
    first = sum(not request.after for request in trace) / len(trace)
    for request in trace:
        found.append(request if request.after else replace(request, arrival_s=now))
        now += 0.0 if request.after else rng.expovariate(rate * first)
    return found


# Figures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    mean: float
    """TTFT, ms."""
    p95: float
    cached: float
    """Share of prompt tokens."""
    skew: float
    """Tokens computed and generated by the busiest engine, over the mean of all."""
    failed: int


def cell(outcome: Outcome, engines: int) -> Cell:
    served = [request for request in outcome.requests if not request.error]
    ttft = [request.ttft_ms for request in served]
    work = [0] * engines
    for request in served:
        work[request.engine] += request.prompt_tokens - request.cached_tokens + request.output_tokens
    cached = sum(request.cached_tokens for request in served) / sum(request.prompt_tokens for request in served)
    skew = max(work) / statistics.fmean(work)
    return Cell(
        statistics.fmean(ttft),
        percentiles([(ms, 1) for ms in ttft], (95,))[0],
        cached,
        skew,
        len(outcome.requests) - len(served),
    )


def mean_of(cells: Sequence[Cell]) -> Cell:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in cells)

    return Cell(mean("mean"), mean("p95"), mean("cached"), mean("skew"), sum(each.failed for each in cells))


def specs() -> dict[str, EngineSpec]:
    found = {}
    for name in ROUTERS:
        chosen = "prefix" if name == "longest_prefix" else name
        plan = resolve((*OVERRIDES, f"router={chosen}")).plan
        found[name] = EngineSpec(plan, 1 + KV_TOKENS // plan.block_size, COST, Overheads(1.0, 1.0, 0.5))
    return found


def outcome_of(
    name: str,
    spec: EngineSpec,
    trace: Sequence[TraceRequest],
    engines: int,
    faults: tuple[dict[int, float], int | None],
) -> Outcome:
    is_longest = name == "longest_prefix"
    router = LongestPrefix(PrefixConfig(), build_context(spec.plan)) if is_longest else router_of(spec.plan)
    deaths, slow = faults
    each = [replace(spec, step_cost=slower(COST, 2.0)) if i == slow else spec for i in range(engines)]
    return simulate(trace, each, router=router, deaths=deaths)


def capacity(spec: EngineSpec, trace: Sequence[TraceRequest], engines: int) -> float:
    """Requests a second that end while the middle half of the trace does, when all of it comes at once."""
    at_once = [replace(request, arrival_s=0.0, after=()) for request in trace]
    ended = sorted(request.e2e_ms / 1e3 for request in simulate(at_once, [spec] * engines).requests)
    first, last = len(ended) // 4, len(ended) * 3 // 4
    return (last - first) / (ended[last] - ended[first])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", default="0.5,0.9")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--faults", action="store_true", help="engine 0 dies halfway, engine 1 is half as fast")
    flags = parser.parse_args()
    known, started, worst = specs(), time.perf_counter(), 0.0
    names = flags.routers.split(",")
    print("| workload, load | router | mean TTFT (ms) | P95 TTFT | cached | max / mean load | failed |")
    print("|---|---|---|---|---|---|---|")
    for workload in flags.workloads.split(","):
        traces = [
            WORKLOADS[workload](random.Random(f"{workload}/{seed}"), flags.requests) for seed in range(flags.seeds)
        ]
        rates = [capacity(known["round_robin"], trace, flags.engines) for trace in traces]
        for load in map(float, flags.loads.split(",")):
            cells: dict[str, list[Cell]] = {name: [] for name in names}
            for seed, (trace, rate) in enumerate(zip(traces, rates, strict=True)):
                timed = arriving(trace, load * rate, seed)
                ends = max(request.arrival_s for request in timed)
                faults = ({0: ends / 2}, 1) if flags.faults else ({}, None)
                for name in names:
                    outcome = outcome_of(name, known[name], timed, flags.engines, faults)
                    cells[name].append(cell(outcome, flags.engines))
            means = {name: mean_of(each) for name, each in cells.items()}
            best = min(each.mean for each in means.values())
            for name, each in means.items():
                mark = "**" if each.mean == best else ""
                shown = f"{mark}{each.mean:.0f}{mark} | {each.p95:.0f} | {each.cached:.0%} | {each.skew:.2f}"
                print(f"| {workload}, {load:g} | {name} | {shown} | {each.failed} |", flush=True)
            if "prefix" in means:
                worst = max(worst, means["prefix"].mean / best - 1)
    verdict = "within" if worst <= TIES else "NOT within"
    print(f"\nprefix is {verdict} {TIES:.0%} of the best everywhere: at worst {worst:.1%}")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
