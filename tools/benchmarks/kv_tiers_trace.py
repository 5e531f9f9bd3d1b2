"""Where prompt tokens come from with a small KV pool and KV stores behind it: `engine simulate`, the engine on this
machine, and a plain LRU of the same sizes, on the same traces.

    python -m tools.benchmarks.kv_tiers_trace [--real] [--traces chat,mooncake --mooncake FILE] [--pool 4096] [--rate 2]

The traces: ``chat`` and ``agents`` of ``tools.benchmarks.routers``, and ``mooncake``, the first requests of
Mooncake's ``conversation_trace.jsonl``, a 32nd as long: a block of 512 tokens becomes one of 16, lengths likewise.
Outputs share nothing with later prompts, as in Mooncake's traces. Memory has room for three times as many blocks as the
pool, the disk for ten times as many. ``--real`` serves each trace with the bundled model, one server after the other,
and simulates requests that come when they were sent there, with the step costs that the engine has kept. A plain LRU
takes requests in the order of their arrivals, whole blocks, the last block of a text first to go; of tiers, each has
what it could hold alone. Shares of prompt tokens; of the engine, those of all stores together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.attack.client import COMPLETIONS, once, request
from tools.attack.harness import Target, serve
from tools.benchmarks.routers import BLOCK, agents, arriving, chat

from engine.assembly.bind import build_context, describe_model
from engine.contracts.step_cost import StepCost
from engine.kv.groups import cache_groups
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.simulation.stores import HEADER, PAGE, record_bytes
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import read_trace
from engine_lab.shared.sizing import measured_step_cost, size_plan

COST = StepCost(4.0, 0.3, 1)
"""Where nothing is served."""
SCALE = 32
MEMORY, DISK = 3, 10
"""Times the pool."""
TIERS = {"pool": 1, "host": MEMORY, "disk": DISK}

Shares = dict[str, float]


def workload(name: str, flags: argparse.Namespace) -> list[TraceRequest]:
    if name == "mooncake":
        trace = read_trace(flags.mooncake, "mooncake", flags.requests)
        first = sum(not each.after for each in trace) / trace[-1].arrival_s
        return [_scaled(each, first / flags.rate) for each in trace]
    make = {"chat": chat, "agents": agents}[name]
    trace = arriving(make(random.Random(name), flags.requests), flags.rate, 0)
    return [replace(each, block_hashes=each.block_hashes[: -(-each.prompt_tokens // BLOCK)]) for each in trace]


def _scaled(asked: TraceRequest, slower: float) -> TraceRequest:
    prompt, output = (max(1, tokens // SCALE) for tokens in (asked.prompt_tokens, asked.output_tokens))
    return replace(
        asked, arrival_s=asked.arrival_s * slower, prompt_tokens=prompt, output_tokens=output, block_tokens=BLOCK
    )


# A plain LRU ----------------------------------------------------------------------------------------------------------


def of_lru(trace: Sequence[TraceRequest], blocks: Mapping[str, int]) -> Shares:
    """``blocks``: of each tier. What a larger one finds beyond the smaller ones is its share."""
    found, before = Shares(), 0.0
    for tier, most in blocks.items():
        share = lru(trace, most) / sum(each.prompt_tokens for each in trace)
        found[tier], before = share - before, share
    return found


def lru(trace: Sequence[TraceRequest], most: int) -> int:
    """Prompt tokens that are found in a cache of so many blocks."""
    cached, found = OrderedDict[object, None](), 0
    for which, each in enumerate(trace):
        keys: list[object] = [*each.block_hashes[: each.prompt_tokens // BLOCK]]
        hit = next((at for at, key in enumerate(keys) if key not in cached), len(keys))
        found += min(hit * BLOCK, each.prompt_tokens - 1)
        whole = (each.prompt_tokens + each.output_tokens - 1) // BLOCK
        for key in [*((which, at) for at in reversed(range(len(keys), whole))), *reversed(keys)]:
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > most:
            cached.popitem(last=False)
    return found


# The simulator --------------------------------------------------------------------------------------------------------


def of_simulation(outcome: Outcome) -> Shares:
    all_tokens = sum(each.prompt_tokens for each in outcome.requests)
    assert not any(each.error for each in outcome.requests)
    loaded = {tier: sum(each.loaded.get(tier, 0) for each in outcome.requests) for tier in ("host", "disk")}
    pool = sum(each.cached_tokens for each in outcome.requests) - sum(loaded.values())
    return {tier: tokens / all_tokens for tier, tokens in ({"pool": pool} | loaded).items()}


# The engine -----------------------------------------------------------------------------------------------------------


async def of_engine(target: Target, trace: Sequence[TraceRequest]) -> tuple[Shares, list[TraceRequest]]:
    """As the responses say, and the trace with the moments at which requests were sent."""
    begun, sent = time.monotonic(), dict[str, float]()
    ended = {each.request_id: asyncio.Event() for each in trace}
    tokens = Counter[str]()

    async def one(asked: TraceRequest) -> None:
        for name in asked.after:
            await ended[name].wait()
        await asyncio.sleep(asked.arrival_s)
        sent[asked.request_id] = time.monotonic() - begun
        fields = {"model": "bundled", "prompt": prompt_of(asked), "max_tokens": asked.output_tokens}
        answer = await once(target, request(COMPLETIONS, fields | {"temperature": 0, "ignore_eos": True}))
        assert answer.status == 200, answer
        timings = answer.json()["timings"]
        cached, loaded = timings["cached_tokens"], timings["loaded_tokens"]
        tokens.update({"all": asked.prompt_tokens, "pool": cached - loaded, "stores": loaded})
        ended[asked.request_id].set()

    await asyncio.gather(*map(one, trace))
    shares = {source: tokens[source] / tokens["all"] for source in ("pool", "stores")}
    return shares, [replace(each, arrival_s=sent[each.request_id], after=()) for each in trace]


def prompt_of(asked: TraceRequest) -> list[int]:
    """Equal blocks have equal ids."""
    ids = [random.Random(block).randrange(100, 3000) for block in asked.block_hashes for _ in range(BLOCK)]
    return ids[: asked.prompt_tokens]


# Runs -----------------------------------------------------------------------------------------------------------------


async def measure(name: str, stores: int, flags: argparse.Namespace, folder: str) -> None:
    """``stores``: how many there are behind the pool."""
    trace, pool = workload(name, flags), flags.pool // BLOCK
    size = sum(record_size())
    bounds = {"host": MEMORY * pool * size, "disk": DISK * pool * -(-(size + HEADER) // PAGE) * PAGE}
    chosen = [*bounds][:stores]
    words = [f"memory.kv_tokens={flags.pool}", "exporter=[]", f"kv_store=[{','.join(chosen)}]"]
    words += [f"kv_store.{tier}.max_bytes={bounds[tier]}" for tier in chosen]
    words += [f"kv_store.disk.path={folder}/{name}"] * ("disk" in chosen)
    cost, rows = COST, dict[str, Shares]()
    if flags.real:
        async with serve(*words, "server.max_queue=4096") as target:
            rows["engine"], trace = await of_engine(target, trace)
        kept = measured_step_cost(size_plan(words))
        cost = COST if kept is None else kept.cost
    outcome = simulate(trace, [EngineSpec(resolve(words).plan, 1 + pool, cost)])
    rows["simulated"] = of_simulation(outcome)
    arrived = sorted(range(len(trace)), key=lambda which: outcome.requests[which].arrival_s)
    blocks = {tier: times * pool for tier, times in list(TIERS.items())[: stores + 1]}
    rows["LRU"] = of_lru([trace[which] for which in arrived], blocks)
    for shares in rows.values():
        shares.setdefault("stores", shares.get("host", 0.0) + shares.get("disk", 0.0))
    pairs = [(a, b) for a in rows.values() for b in rows.values()]
    apart = max(abs(a[source] - b[source]) for a, b in pairs for source in a.keys() & b.keys())
    for source, shares in rows.items():
        cells = [f"{shares[each]:.1%}" if each in shares else "" for each in ("pool", "stores", "host", "disk")]
        last = f"{apart * 100:.1f}" if source == "LRU" else ""
        print(f"| {name} | {' + '.join(blocks)} | {source} | {' | '.join(cells)} | {last} |", flush=True)


def record_size() -> tuple[int, ...]:
    plan = resolve(("exporter=[]",)).plan
    return record_bytes(plan, build_context(plan), cache_groups(describe_model(plan).graph.caches))


async def main(flags: argparse.Namespace) -> None:
    names = ("trace", "tiers", "source", "pool", "stores", "host", "disk", "most apart, points")
    print("|", " | ".join(names), "|")
    print("|---" * len(names) + "|")
    for name in flags.traces.split(","):
        for stores in map(int, flags.stores.split(",")):
            with tempfile.TemporaryDirectory(prefix="kv-tiers-") as folder:
                await measure(name, stores, flags, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="serve the traces, too")
    parser.add_argument("--traces", default="chat,agents", help="of chat, agents, mooncake (%(default)s)")
    parser.add_argument("--mooncake", type=Path, help="conversation_trace.jsonl")
    parser.add_argument("--stores", default="0,1,2", help="how many behind the pool (%(default)s)")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--pool", type=int, default=4096, help="tokens")
    flags = parser.parse_args()
    if "mooncake" in flags.traces and flags.mooncake is None:
        parser.error("--traces mooncake needs --mooncake FILE")
    asyncio.run(main(flags))
