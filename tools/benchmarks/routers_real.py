"""Routers beside each other before real engines: one trace, sent to a server of three for each router in turns.

    python -m tools.benchmarks.routers_real [--requests 240] [--rate 6] [--engines 3] [--rounds 2]

The workload ``shared`` of ``tools.benchmarks.routers``: prompts of 24 kinds with a beginning of 1,024 tokens each, as
token ids for the bundled model. An engine caches 12,288 tokens, so none of them has room for all beginnings, and three
have. The engines share this machine's cores: what a router saves is work, not waiting for one engine beside idle ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tools.attack.client import COMPLETIONS, Connection, ask, request
from tools.attack.fleet import all_ready, engines
from tools.attack.harness import Target, serve
from tools.benchmarks.routers import BLOCK, arriving, shared

from engine.contracts.percentiles import percentiles
from engine.counters import declared
from engine_lab.shared.simulation.trace import TraceRequest

ROUTERS = ("round_robin", "least_load", "prefix")
KV_TOKENS = 12_288


@dataclass(frozen=True, slots=True)
class Round:
    ttft_ms: list[float]
    cached: float
    """Share of prompt tokens."""
    skew: float
    """Sequences of the busiest engine, over the mean of all."""


def prompt_of(asked: TraceRequest) -> list[int]:
    """Equal blocks have equal ids."""
    ids = [random.Random(block).randrange(100, 3000) for block in asked.block_hashes for _ in range(BLOCK)]
    return (ids + ids[:BLOCK])[: asked.prompt_tokens]


async def replay(target: Target, trace: Sequence[TraceRequest]) -> Round:
    before = await counts(target)

    async def one(asked: TraceRequest) -> float:
        await asyncio.sleep(asked.arrival_s)
        body = {"prompt": prompt_of(asked), "max_tokens": min(32, asked.output_tokens), "temperature": 0}
        answer = await ask(target, COMPLETIONS, body | {"stream": True, "ignore_eos": True})
        assert answer.ending == "whole", answer
        return answer.at_s[0] * 1e3

    ttft = await asyncio.gather(*[one(asked) for asked in trace])
    after = await counts(target)
    grown = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in before}
    sequences = [each[0] for each in grown.values()]
    hits, queries = (sum(each[i] for each in grown.values()) for i in (1, 2))
    return Round(ttft, hits / queries, max(sequences) / statistics.fmean(sequences))


async def counts(target: Target) -> dict[str, tuple[float, float, float]]:
    """Of each engine: sequences that ended, prompt tokens found in its cache, prompt tokens looked up."""
    connection = await Connection.open(target)
    page = (await connection.ask(request("/metrics"))).body.decode()
    connection.close()

    def total(engine: str, name: str) -> float:
        label = f'engine="{engine}"'
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith(f"{name}{{") and label in line
        )

    metrics = (declared.REQUESTS, declared.PREFIX_CACHE_HITS, declared.PREFIX_CACHE_QUERIES)
    return {engine: (*(total(engine, metric.name) for metric in metrics),) for engine in await engines(target)}


async def main(flags: argparse.Namespace) -> None:
    found: dict[str, list[Round]] = {router: [] for router in ROUTERS}
    for seed in range(flags.rounds):
        trace = arriving(shared(random.Random(seed), flags.requests), flags.rate, seed)
        for router in ROUTERS:
            words = (f"fleet.replicas={flags.engines}", f"router={router}", f"memory.kv_tokens={KV_TOKENS}")
            async with serve(*words, "server.max_queue=1024") as target:
                await all_ready(target)
                found[router].append(await replay(target, trace))
    print(
        "| router | mean TTFT (ms), by round | P50 | P95 | cached | max / mean sequences |\n|---|---|---|---|---|---|"
    )
    for router, rounds in found.items():
        all_ms = [(ms, 1) for each in rounds for ms in each.ttft_ms]
        p50, p95 = percentiles(all_ms, (50, 95))
        means = ", ".join(f"{statistics.fmean(each.ttft_ms):.0f}" for each in rounds)
        cached, skew = (statistics.fmean(getattr(each, name) for each in rounds) for name in ("cached", "skew"))
        print(f"| {router} | {means} | {p50:.0f} | {p95:.0f} | {cached:.0%} | {skew:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(main(parser.parse_args()))
