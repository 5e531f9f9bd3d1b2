"""Does ``engine simulate`` say what this engine does on this machine? Serves synthetic traces, and simulates them.

    python -m tools.benchmarks.simulator [--out DIR] [--seconds 10] [--repeats 2] [--loads 0.3,0.6] [--traces code]
                                         [--pairs | --speed] [overrides]

The step cost and the API process's overheads are fitted once, on steps and requests of the ``conversation`` trace, and
written to DIR/calibration.json; the other traces, and all loads, are foretold with it. Since a shared machine becomes
slower and faster, each run is foretold twice: as calibrated, and with steps as much longer as they were in it, all
together (``pace``). A cell is the measured mean, both errors, and the spread of the repeats, which are minutes apart. A
load is a share of the rate at which the simulator serves the whole trace at once. ``--pairs``: which of two plugin sets
has the lower mean TTFT and ITL, in reality (both are up, and take turns as ABBA) and simulated. Figures go to
DIR/figures.json; tables are printed as markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from engine.contracts.percentiles import percentiles
from engine.contracts.step_cost import StepCost, StepWork
from engine.loop.step_cost import StepCostModel
from engine_lab.shared.simulation.calibration import SCHEMA, Calibration, read_calibration, write_calibration
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import most_blocks, resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import EngineSpec, Overheads, slower
from engine_lab.shared.simulation.trace import TraceRequest

BLOCK, KV_TOKENS, TOKEN_IDS = 16, 16384, range(300, 4000)
LOADS = (0.3, 0.6, 0.8, 0.95)
PAIRS = (
    ("scheduler=continuous",),
    ("scheduler=static",),
    ("kv_allocator=paged",),
    ("kv_allocator=contiguous",),
    ("overlap=false",),
    ("scheduler.max_requests=2",),
    ("scheduler.max_requests=4",),
    ("scheduler.token_budget=64",),
    ("scheduler.token_budget=256",),
    ("memory.kv_tokens=4096",),
)
"""Each against the plan itself."""


# Traces ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths are lognormal: median and sigma."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    shared: int
    """Tokens that prompts have in common with those of the same kind; there are four kinds."""
    long_share: float = 0.0
    long_prompt: int = 0


SHAPES = {
    "conversation": Shape((220, 0.7), (60, 0.6), 128),
    "code": Shape((500, 0.5), (16, 0.5), 320),
    "long-prompt": Shape((80, 0.5), (48, 0.5), 0, 0.15, 1500),
}


def trace_of(shape: Shape, count: int, rate: float, seed: int) -> list[TraceRequest]:
    """``rate``: per second; infinite: all at once."""
    rng, now, trace = random.Random(seed), 0.0, []
    for i in range(count):
        prompt = _length(rng, shape.prompt, shape.shared + 8, 1800)
        if rng.random() < shape.long_share:
            prompt = round(shape.long_prompt * rng.uniform(0.8, 1.2))
        kind, shared = rng.randrange(4), shape.shared // BLOCK
        own = range(shared, -(-prompt // BLOCK))
        hashes = (*(kind * 1000 + block for block in range(shared)), *(10_000 + i * 1000 + block for block in own))
        trace.append(TraceRequest(now, prompt, _length(rng, shape.output, 2, 200), hashes, BLOCK))
        now += rng.expovariate(rate) if rate < float("inf") else 0.0
    return trace


def _length(rng: random.Random, median_sigma: tuple[float, float], low: int, high: int) -> int:
    median, sigma = median_sigma
    return min(high, max(low, round(median * rng.lognormvariate(0.0, sigma))))


# Reality --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    events: Path


@contextmanager
def serving(overrides: Sequence[str], out: Path, port: int) -> Iterator[Server]:
    events = out / f"events-{time.time_ns()}.jsonl"
    words = (f"memory.kv_tokens={KV_TOKENS}", *overrides, f"server.port={port}", "exporter=[prometheus,jsonl]")
    command = [sys.executable, "-m", "engine.cli.main", "serve", *words, f"exporter.jsonl.path={events}"]
    with (out / "serve.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            asyncio.run(_ready(f"http://127.0.0.1:{port}", process))
            yield Server(f"http://127.0.0.1:{port}", events)
        finally:
            process.terminate()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}: see serve.log")
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit("the server is not ready after two minutes")


def replay(server: Server, trace: Sequence[TraceRequest], nonce: str) -> list[dict[str, Any]]:
    """The events of the server while it serves the trace. A request that fails ends the benchmark."""
    before = server.events.stat().st_size if server.events.exists() else 0
    asyncio.run(_send_all(server.url, trace, nonce))
    for _ in range(50):  # the bus writes in batches
        time.sleep(0.2)
        with server.events.open("rb") as file:
            file.seek(before)
            events = [json.loads(line) for line in file if line.endswith(b"\n")]
        ended = [event["finish_reason"] for event in events if event["type"] == "request"]
        if len(ended) >= len(trace):
            break
    if ended != ["length"] * len(trace):  # a stream that fails has sent status 200 before
        raise SystemExit(f"{len(trace)} requests ended as {Counter(ended)}, each expected as length: see serve.log")
    return events


async def _send_all(url: str, trace: Sequence[TraceRequest], nonce: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        bodies = [_body(model, request, nonce) for request in trace]
        started = time.monotonic()

        async def one(request: TraceRequest, body: bytes) -> None:
            await asyncio.sleep(max(0.0, started + request.arrival_s - time.monotonic()))
            headers = {"content-type": "application/json"}
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                response.raise_for_status()
                await response.read()

        await asyncio.gather(*map(one, trace, bodies))


def _body(model: str, request: TraceRequest, nonce: str) -> bytes:
    prompt = [token for name in request.block_hashes for token in _block(nonce, name)][: request.prompt_tokens]
    fields = {"model": model, "prompt": prompt, "max_tokens": request.output_tokens, "ignore_eos": True, "stream": True}
    return json.dumps(fields).encode()


def _block(nonce: str, name: int) -> list[int]:
    return random.Random(f"{nonce}/{name}").choices(TOKEN_IDS, k=BLOCK)


# Fitting --------------------------------------------------------------------------------------------------------------


def fitted(events: Sequence[Mapping[str, Any]], num_blocks: int, words: str) -> Calibration:
    requests = [event for event in events if event["type"] == "request"]
    arriving = [r["receive_ms"] + r["tokenize_ms"] + r["route_ms"] for r in requests]
    dispatch = sorted(r["dispatch_ms"] for r in requests)[len(requests) // 10]  # of those that hit no running step
    deliver = statistics.median(r["deliver_ms"] for r in requests)
    overheads = Overheads(statistics.median(arriving) + dispatch, 0.0, deliver)
    return Calibration(SCHEMA, step_cost(events), overheads, num_blocks, measured_on=words)


def step_cost(events: Sequence[Mapping[str, Any]]) -> StepCost:
    """As an engine would hand it on, but for the gap, which is the mean."""
    model, steps = StepCostModel(), steps_of(events)
    for step in steps:
        model.observe(work_of(step), step["device_ms"])
    gaps = [step["gap_ms"] for step in steps if step["gap_ms"] > 0]
    gap = _mean(min(each, percentiles([(gap, 1) for gap in gaps], (99,))[0]) for each in gaps) if gaps else 0.0
    return replace(model.state().cost, gap_ms=gap)


def steps_of(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["type"] == "step"]


def work_of(step: Mapping[str, Any]) -> StepWork:
    tokens = step["num_prefill_tokens"] + step["num_decode_tokens"]
    return StepWork(step["num_requests"], tokens, step["decode_context"], step["prefill_context"], step["drafted"])


def pace_of(events: Sequence[Mapping[str, Any]], cost: StepCost) -> float:
    """How much longer steps took than ``cost`` says, all together: what a shared machine does beside."""
    steps = steps_of(events)
    return float(sum(step["device_ms"] for step in steps) / sum(cost.ms(work_of(step)) for step in steps))


# Figures --------------------------------------------------------------------------------------------------------------


def of_reality(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    requests = [event for event in events if event["type"] == "request"]
    gaps = sum(request["output_tokens"] - 1 for request in requests)
    itl = [(event["itl_ms"], event["num_tokens"]) for event in events if event["type"] == "tokens"]
    ttft = [(request["ttft_ms"], 1) for request in requests]
    return {
        "TTFT mean": _mean(request["ttft_ms"] for request in requests),
        "TTFT P95": percentiles(ttft, (95,))[0],
        "ITL mean": sum(request["decode_ms"] for request in requests) / gaps,
        "ITL P95": percentiles(itl, (95,))[0],
        "queue": _mean(request["dispatch_ms"] + request["queue_ms"] for request in requests),
        "prefill": _mean(request["prefill_ms"] for request in requests),
        "gap": _mean(event["gap_ms"] for event in events if event["type"] == "step"),
    }


def of_simulation(outcome: Outcome) -> dict[str, float]:
    requests = outcome.requests
    gaps = sum(request.output_tokens - 1 for request in requests)
    return {
        "TTFT mean": _mean(request.ttft_ms for request in requests),
        "TTFT P95": percentiles([(request.ttft_ms, 1) for request in requests], (95,))[0],
        "ITL mean": sum(request.decode_ms for request in requests) / gaps,
        "ITL P95": percentiles([(us / 1e3, count) for us, count in outcome.itl_us], (95,))[0],
        "queue": _mean(request.dispatch_ms + request.queue_ms for request in requests),
        "prefill": _mean(request.prefill_ms for request in requests),
        "gap": sum(steps.gap_ms for steps in outcome.steps) / sum(steps.num_steps for steps in outcome.steps),
    }


def _mean(values: Any) -> float:
    return statistics.fmean(values)


# Runs -----------------------------------------------------------------------------------------------------------------


def spec_of(overrides: Sequence[str], calibration: Calibration) -> EngineSpec:
    resolved = resolve((f"memory.kv_tokens={KV_TOKENS}", *overrides))
    return EngineSpec(resolved.plan, most_blocks(resolved.plan), calibration.step_cost, calibration.overheads)


def capacity(shape: Shape, spec: EngineSpec) -> float:
    """Requests per second, when there are always more."""
    outcome = simulate(trace_of(shape, 200, float("inf"), 1), [spec])
    return 200 / outcome.duration_s


def calibrate(server: Server, overrides: Sequence[str], out: Path, seconds: float) -> Calibration:
    """Two rates: one at which requests are mostly alone, one at which several run."""
    shape, events = SHAPES["conversation"], []
    one_by_one = replay(server, trace_of(shape, 8, 1.0, 90), "alone")
    alone_s = _mean(event["e2e_ms"] for event in one_by_one if event["type"] == "request") / 1e3
    for number, at_once in enumerate((0.3, 1.2, 2.5)):
        rate = at_once / alone_s
        events += replay(server, trace_of(shape, max(8, round(rate * seconds)), rate, 91 + number), f"fit{number}")
    found = fitted(events, 1 + KV_TOKENS // BLOCK, " ".join(overrides) or "bundled")
    write_calibration(out / "calibration.json", found)
    return found


def measure(server: Server, spec: EngineSpec, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """The repeats are passes through all traces and loads, so that their spread has the machine's drift in it."""
    cells = []
    for name in flags.traces.split(","):
        at_most = capacity(SHAPES[name], spec)
        for load in map(float, flags.loads.split(",")):
            rate = load * at_most
            trace = trace_of(SHAPES[name], max(12, round(rate * flags.seconds)), rate, 5)
            cells.append(({"trace": name, "load": load, "rate": rate, "requests": len(trace)}, trace))
    runs: list[list[tuple[dict[str, float], float]]] = [[] for _ in cells]
    for number in range(flags.repeats):
        for (row, trace), found in zip(cells, runs, strict=True):
            events = replay(server, trace, f"{row['trace']}{row['load']}{number}")
            found.append((of_reality(events), pace_of(events, spec.step_cost)))
    rows = []
    for (row, trace), found in zip(cells, runs, strict=True):
        real, paces = zip(*found, strict=True)
        begun = time.perf_counter()
        outcome = simulate(trace, [spec])
        speed = outcome.duration_s / (time.perf_counter() - begun)
        paced = [replace(spec, step_cost=slower(spec.step_cost, pace)) for pace in paces]
        at_paces = [of_simulation(simulate(trace, [each])) for each in paced]
        said = {"simulated": of_simulation(outcome), "simulated_at_pace": at_paces}
        rows.append({**row, "paces": paces, "speed": speed, "real": real, **said})
        print(_row(rows[-1]), flush=True)
    return rows


def _row(row: Mapping[str, Any]) -> str:
    paces = "-".join(f"{pace:.2f}" for pace in (min(row["paces"]), max(row["paces"])))
    cells = [row["trace"], f"{row['load']:g}", str(row["requests"]), paces]
    for name, said in row["simulated"].items():
        values = [real[name] for real in row["real"]]
        mean = _mean(values)
        spread = (max(values) - min(values)) / mean if mean else 0.0
        paced = _mean(each[name] for each in row["simulated_at_pace"])
        errors = [(each - mean) / mean if mean else 0.0 for each in (said, paced)]
        cells.append(f"{mean:.2f}, {errors[0]:+.0%} / {errors[1]:+.0%} ({spread:.0%})")
    return "| " + " | ".join(cells) + " |"


def compare_pairs(
    overrides: Sequence[str], calibration: Calibration, flags: argparse.Namespace
) -> list[dict[str, Any]]:
    base = spec_of(overrides, calibration)
    shape = SHAPES[flags.traces.split(",")[0]]
    rate = float(flags.loads.split(",")[0]) * capacity(shape, base)
    trace = trace_of(shape, max(12, round(rate * flags.seconds)), rate, 6)
    found, warm = [], trace_of(shape, 4, 2.0, 7)
    said = of_simulation(simulate(trace, [base]))
    print("| override | TTFT | simulated | agrees | ITL | simulated | agrees |", flush=True)
    with serving(overrides, flags.out, flags.port) as first:
        replay(first, warm, "warm")
        for number, words in enumerate(PAIRS, 1):
            with serving((*overrides, *words), flags.out, flags.port + number) as other:
                replay(other, warm, "warm")
                servers = (first, other, other, first) * flags.repeats
                runs = [of_reality(replay(each, trace, f"{words}{i}")) for i, each in enumerate(servers)]
            both = {"first": runs[::4] + runs[3::4], "other": runs[1::4] + runs[2::4]}
            foreseen = of_simulation(simulate(trace, [spec_of((*overrides, *words), calibration)]))
            found.append({"overrides": words, "real": both, "simulated": {"first": said, "other": foreseen}})
            print(_pair(found[-1]), flush=True)
    return found


def _pair(pair: Mapping[str, Any]) -> str:
    """Ratios of the other one to the first. Nobody wins in reality where their runs overlap, nor simulated within
    1 %."""
    cells = [f"`{' '.join(pair['overrides'])}`"]
    for name in ("TTFT mean", "ITL mean"):
        first, other = ([run[name] for run in pair["real"][of]] for of in ("first", "other"))
        real, said = _mean(other) / _mean(first), pair["simulated"]["other"][name] / pair["simulated"]["first"][name]
        wins = (min(other) > max(first)) - (max(other) < min(first))
        foreseen = (said > 1.01) - (said < 0.99)
        agrees = {1: "yes", -1: "no"}.get(wins * foreseen, "nobody wins" if wins == foreseen else "one is undecided")
        cells += [f"{real:.2f}", f"{said:.2f}", agrees]
    return "| " + " | ".join(cells) + " |"


def speed(overrides: Sequence[str]) -> None:
    """Simulated seconds per second of this process on a CPU, at steps of 12 ms: one engine, and 16 for an hour."""
    spec = EngineSpec(resolve(overrides).plan, 8000, StepCost(12.0, 0.01, 1), Overheads())
    for engines, rate, seconds in ((1, 1.0, 600.0), (1, 4.0, 300.0), (1, 8.0, 150.0), (16, 16.0, 3600.0)):
        trace = trace_of(SHAPES["conversation"], round(rate * seconds), rate, 3)
        begun, cpu = time.perf_counter(), time.process_time()
        outcome = simulate(trace, [spec] * engines)
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        steps = sum(steps.num_steps for steps in outcome.steps)
        running = max(steps.most_running for steps in outcome.steps)
        cells = engines, f"{rate / engines:g}", running, steps, f"{cpu_s:.1f}", f"{wall_s:.1f}"
        print("|", " | ".join(map(str, (*cells, f"{outcome.duration_s / cpu_s:.0f}"))), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("simulator"))
    parser.add_argument("--calibration", type=Path, help="of an earlier run: fits nothing")
    parser.add_argument("--traces", default=",".join(SHAPES))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--pairs", action="store_true", help="compare plugin sets, at the first trace and load")
    parser.add_argument("--port", type=int, default=8970)
    parser.add_argument("--speed", action="store_true", help="how fast the simulator is: serves nothing")
    flags = parser.parse_args()
    if flags.speed:
        speed(flags.overrides)
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.pairs:
        if flags.calibration is None:
            parser.error("--pairs needs --calibration")
        result: Any = compare_pairs(flags.overrides, read_calibration(flags.calibration), flags)
    else:
        with serving(flags.overrides, flags.out, flags.port) as server:
            if flags.calibration is not None:
                calibration = read_calibration(flags.calibration)
            else:
                calibration = calibrate(server, flags.overrides, flags.out, flags.seconds)
            print(calibration.step_cost, calibration.overheads, flush=True)
            names = ("trace", "load", "requests", "pace", "TTFT mean", "TTFT P95", "ITL mean", "ITL P95")
            print("|", " | ".join((*names, "queue", "prefill", "gap")), "|", flush=True)
            result = measure(server, spec_of(flags.overrides, calibration), flags)
    name = "pairs" if flags.pairs else "figures"
    (flags.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
