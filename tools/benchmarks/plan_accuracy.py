"""Is ``engine plan`` right on this machine? Memory, requests at once, TTFT and ITL, predicted and measured.

    python -m tools.benchmarks.plan_accuracy [--out DIR] [--requests 60] [--only 0,3] [--model DIR]

Each configuration is served twice: once so that the engine measures what its steps cost, under loads of other lengths,
and once under the load that was planned, which is sent several times: the spread between those is what the machine
does to itself. Prints a table; goals are 3 % of memory, 10 % of requests at once, 10 % of ITL and 20 % of TTFT
(medians). Rates are below saturation. The row ``step mean`` has the steps of the planned load, as the fit says and as
they took: an error there is the fit's or the machine's pace, one in ITL alone is the plan's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tools.benchmarks.simulator import work_of

from engine.contracts.step_cost import StepCost

ENGINE = (sys.executable, "-m", "engine.cli.main")
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is planned. ``is_large``: of the model given by ``--model``, not the bundled one."""

    is_large: bool
    overrides: tuple[str, ...]
    prompt: int
    output: int
    rate: float


CONFIGURATIONS = (
    Configuration(False, (), 128, 64, 4.0),
    Configuration(False, ("kv_format=int8", "memory.kv_tokens=4096"), 512, 32, 4.0),
    Configuration(False, ("quantizer=int8",), 64, 128, 2.0),
    Configuration(True, ("memory.kv_tokens=16384",), 128, 32, 0.5),
    Configuration(True, ("quantizer=int8", "memory.kv_tokens=16384"), 256, 32, 0.5),
    Configuration(True, ("quantizer=int4", "memory.kv_tokens=16384"), 128, 64, 0.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("plan_accuracy"), help="where results go (%(default)s)")
    parser.add_argument("--requests", type=int, default=60, help="measured for each configuration (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of the load that was planned (%(default)s)")
    parser.add_argument("--only", default="", help="numbers of configurations, as in 0,3")
    parser.add_argument("--model", help="the larger model; without it, its configurations are left out")
    parser.add_argument("--port", type=int, default=8461)
    flags = parser.parse_args()
    out = flags.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = [int(number) for number in flags.only.split(",")] if flags.only else range(len(CONFIGURATIONS))
    print("| configuration | load | figure | predicted | measured | spread | error |\n|---|---|---|---|---|---|---|")
    for number in wanted:
        each = CONFIGURATIONS[number]
        if each.is_large and flags.model is None:
            continue
        for row in measured(each, flags, out / str(number)):
            print(f"| {' | '.join(row)} |", flush=True)


def measured(each: Configuration, flags: argparse.Namespace, out: Path) -> Iterator[tuple[str, ...]]:
    """Rows of the table."""
    out.mkdir(exist_ok=True)
    words = [*each.overrides, f"calibration={out}"]
    words += [f"model.path={flags.model}"] if each.is_large else []
    with serving(words, flags.port, out) as url:
        for prompt, output in ((each.prompt * 2, each.output), (each.prompt // 2, each.output * 2)):
            bench(url, out / "fit.json", prompt, output, max(20, flags.requests // 3), each.rate, 1)
    load = f"in={each.prompt},out={each.output},rate={each.rate:g}"
    plan = run("plan", "--json", "--workload", load, "--requests", str(flags.requests), *words)
    record = out / "events.jsonl"
    record.unlink(missing_ok=True)
    recorded = [*words, "exporter=[prometheus,jsonl]", f"exporter.jsonl.path={record}"]
    with serving(recorded, flags.port, out) as url:
        engine = json.loads(fetch(f"{url}/engine/plan"))["engine"]
        found = [
            bench(url, out / f"bench{number}.json", each.prompt, each.output, flags.requests, each.rate, 0)
            for number in range(flags.repeats)
        ]
    pool = plan["memory_bytes"]["KV pool"]["value"]
    held = engine["kv_tokens"] // (each.prompt + each.output)
    pairs = [
        ("weights, MB", plan["memory_bytes"]["weights"]["value"] / 1e6, [engine["weights_bytes"] / 1e6]),
        ("KV pool, MB", pool / 1e6, [engine["kv_bytes"] / 1e6]),
        ("requests by memory", plan["requests_by_memory"]["value"], [held]),
    ]
    for name in ("itl_ms", "ttft_ms"):
        for key in ("p50", "p95"):
            if (predicted := plan["prediction"][name][key]) is not None:  # of too few requests
                pairs.append((f"{name} {key}", predicted, [metrics[name][key] for metrics in found]))
    steps = [event for event in map(json.loads, record.read_text().splitlines()) if event["type"] == "step"]
    fit = msgspec.convert(plan["steps"]["cost"], StepCost)
    said = statistics.fmean(fit.ms(work_of(step)) for step in steps)
    pairs.append(("step mean, ms", said, [statistics.fmean(step["device_ms"] for step in steps)]))
    title = f"{'386M shape' if each.is_large else 'bundled'} {' '.join(each.overrides)} ({plan['steps']['origin']})"
    for name, predicted, values in pairs:
        real, spread = statistics.median(values), (max(values) - min(values)) / statistics.median(values)
        yield title, load, name, f"{predicted:.4g}", f"{real:.4g}", f"{spread:.0%}", f"{predicted / real - 1:+.1%}"


@contextmanager
def serving(words: Sequence[str], port: int, out: Path) -> Iterator[str]:
    """A server with these overrides; it is stopped after."""
    url = f"http://127.0.0.1:{port}"
    with (out / "server.log").open("wb") as log:
        process = subprocess.Popen([*ENGINE, "serve", f"server.port={port}", *words], stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                fetch(f"{url}/ready")
                break
            except (OSError, urllib.error.URLError):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server does not start: see {out / 'server.log'}") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def bench(url: str, file: Path, prompt: int, output: int, requests: int, rate: float, seed: int) -> Any:
    """Send a load as ``engine plan`` says it would come; returns what the client measured."""
    words = ("--url", url, "--rate", str(rate), "--requests", str(requests), "--prompt-tokens", str(prompt))
    words += ("--output-tokens", str(output), "--seed", str(seed), "--ignore-eos", "--prompt-ids", "1000")
    command = [*ENGINE, "bench", *words, "--endpoint", "completions", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{file}: {done.stderr.strip()}", file=sys.stderr)
    result = json.loads(file.read_text())
    if failed := result["requests"]["failed"]:
        raise SystemExit(f"{file}: requests failed: {failed}")
    return result["metrics"]


def run(*words: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(subprocess.run([*ENGINE, *words], check=True, capture_output=True, text=True).stdout)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        found: bytes = answer.read()
    return found


if __name__ == "__main__":
    main()
