"""TTFT of many long prompts at once whose beginnings are on a slow disk: as the engine decides, always loaded, and
always computed.

    python -m tools.benchmarks.kv_losing [--prompts 64] [--rounds 2] [--real] [--rates 0.1,0.4]

Without ``--real`` the engine's loop is on a simulated device and a simulated disk: shapes like Llama 3 8B on a GPU and
386M parameters on a CPU, and rates beside the one at which reading takes as long as computing. With it, the engine on
this machine has a model that computes little and caches much, and a disk that gives so many bytes a second.
``10x believed``: reads are first believed to be ten times as quick as they are. P95 of TTFT, as a multiple of always
computing in the same round; medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.assembly.assemble import assemble
from engine.contracts.kv_store import RecordId, RecordLayout, StoreUsage
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.step_cost import StepCost
from engine.loop.core import EngineCore
from engine.loop.staging import FIRST_RATE, Read, Staging
from engine.startup.build import build_engine
from engine_lab.shared.simulation.engine import SimulatedEngine
from engine_lab.shared.simulation.plans import most_blocks, resolve
from engine_lab.shared.simulation.spec import EngineSpec

WAYS = ("computed", "loaded", "engine", "rate known", "10x believed", "0.1x believed")
COMPUTE, ALWAYS, ENGINE, KNOWN, TOO_QUICK, TOO_SLOW = WAYS
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
}


def llama(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, dtype: str) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "torch_dtype": dtype}
    more = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": 2000}
    return {**LLAMA, **shape, **more}


SHAPES = {
    "8B, GPU": (llama(4096, 32, 32, 4, 128, 14336, "bfloat16"), StepCost(6.0, 0.045, 100), 2048),
    "386M, CPU": (llama(896, 24, 14, 2, 64, 4864, "bfloat16"), StepCost(28.0, 0.6, 100), 4096),
}
"""With assumed step costs, and tokens of a prompt. Of 8B half of the key heads: as many bytes as in 8 bits."""
WIDE = llama(64, 4, 8, 8, 128, 64, "float32"), 512
"""Computes little, caches much."""


class ThrottledDisk:
    """A store that has what was put there, and gives so many bytes a second, one read after the other."""

    def __init__(self, rate: float, wake: Callable[[], None]) -> None:
        self._rate, self._wake = rate, wake
        self._records: dict[RecordId, bytes] = {}
        self._reads: list[tuple[float, int, Sequence[RecordId], Sequence[memoryview]]] = []
        self._numbers, self._until_s = count(), 0.0

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None: ...

    def usage(self) -> StoreUsage:
        return StoreUsage(len(self._records), 0, 1 << 40)

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self._records

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        if self.has(group, key):
            return False
        self._records[group, key] = bytes(record)
        done()
        return True

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        number, now = next(self._numbers), time.monotonic()
        self._until_s = max(now, self._until_s) + sum(map(len, into)) / self._rate
        self._reads.append((self._until_s, number, ids, into))
        timer = threading.Timer(self._until_s - now, lambda: self._wake())
        timer.daemon = True
        timer.start()
        return number

    def poll(self) -> Sequence[tuple[int, int]]:
        ended = []
        while self._reads and self._reads[0][0] <= time.monotonic():
            _, number, ids, into = self._reads.pop(0)
            for each, buffer in zip(ids, into, strict=True):
                buffer[:] = self._records[each]
            ended.append((number, len(ids)))
        return ended

    def idle(self) -> None:
        """Nobody waits for reads of an earlier round any more."""
        self._until_s = 0.0
        self._reads = [(0.0, *read[1:]) for read in self._reads]

    def clear(self) -> None: ...

    def close(self, deadline_s: float) -> None: ...


def decide(staging: Staging, way: str, rate: float) -> None:
    """Have reads decided as a way says."""
    believed = {KNOWN: rate, TOO_QUICK: 10 * rate, TOO_SLOW: rate / 10}.get(way, FIRST_RATE)
    staging._rates[:] = [believed] * len(staging._rates)

    def read(number: int, ids: Sequence[RecordId], compute_s: float, ahead_s: float) -> Read | None:
        if way == COMPUTE:
            return None
        if way != ALWAYS:
            return Staging.read(staging, number, ids, compute_s, ahead_s)
        most, staging._most_bytes = staging._most_bytes, math.inf
        found = Staging.read(staging, number, ids, 1e9)
        staging._most_bytes = most
        return found

    staging.read = read  # type: ignore[method-assign]


def empty(core: EngineCore) -> Staging:
    """Pool and memory forget; the disk has all."""
    assert core._pool.tiers is not None
    core.take_stored()
    core._pool.allocator.reset_cache()
    core._pool.tiers._memory.store.clear()
    return core._pool.tiers._staging


def prompts_of(number: int, tokens: int) -> list[EngineRequest]:
    draw = random.Random(0)
    texts = [tuple(draw.randrange(3, 2000) for _ in range(tokens + 1)) for _ in range(number)]
    return [EngineRequest(str(name), text, replace(ONE, seed=name)) for name, text in enumerate(texts)]


def overrides(path: Path, tokens: int, memory: int) -> list[str]:
    return [
        *(f"model.path={path}", f"model.max_len={tokens + 64}", f"memory.kv_tokens={8 * tokens}", "exporter=[]"),
        *("kv_store=[host]", f"kv_store.host.max_bytes={memory}"),
    ]


def summary(firsts: Sequence[float]) -> float:
    return statistics.quantiles(firsts, n=20)[-1]


class Simulated:
    """The loop on a simulated device, with a simulated disk."""

    def __init__(self, path: Path, cost: StepCost, number: int, tokens: int, memory: int, rate: float) -> None:
        disk = ("kv_store=[host,disk]", f"kv_store.disk.path={path / 'kv'}", "kv_store.disk.max_bytes=1000000000000")
        plan = resolve([*overrides(path, tokens, memory), *disk]).plan
        self._engine = SimulatedEngine(EngineSpec(plan, most_blocks(plan), cost, rates={"disk": math.inf}), 0, False)
        self._requests = prompts_of(number, tokens)
        self._run(self._requests)
        (self._disk,), self._rate = self._engine._stores.staged, rate  # type: ignore[union-attr]
        self._disk._rate = rate

    def _run(self, requests: Sequence[EngineRequest]) -> list[float]:
        engine, began = self._engine, self._engine.clock.now
        for request in requests:
            engine.post(began, request, (7,))
        firsts = []
        while engine.next_s is not None:
            for output in engine.run():
                if output.finish_reason is not None:
                    firsts.append(engine.forget(output.request_id).first_s - began)
        return firsts

    def ttft_s(self, way: str) -> list[float]:
        self._engine.clock.now += 1e4  # reads of an earlier round have ended
        decide(empty(self._engine._core), way, self._rate)
        return self._run(self._requests)

    def skipped(self) -> str:
        return skipped(self._engine._core)


class Real:
    """The engine on this machine, with a disk that is made slow."""

    def __init__(self, path: Path, number: int, tokens: int, memory: int, rate: float) -> None:
        engine = build_engine(assemble(overrides(path, tokens, memory)))
        self._core, self._rate, self._numbers, self._woken = engine.core, rate, count(), threading.Event()
        self._core.wake = self._woken.set
        self._disk, device = ThrottledDisk(rate, self._woken.set), self._core._device
        sizes: Any = device._runner.records.num_bytes  # type: ignore[attr-defined]
        self._core.keep_records(["host", "disk"], [engine.bound.kv_stores[0], self._disk], sizes, device.store)  # type: ignore[attr-defined]
        self._requests = prompts_of(number, tokens)
        for request in self._requests:
            self._run([request])
            self._core.take_stored()

    def _run(self, requests: Sequence[EngineRequest]) -> list[float]:
        core, began, firsts = self._core, time.monotonic(), list[float]()
        for request in requests:
            core.submit(replace(request, request_id=str(next(self._numbers))))
        while core.has_work:
            if rest_s := core.rest_s():  # as the engine's own loop does
                self._woken.wait(rest_s)
                self._woken.clear()
            firsts += [time.monotonic() - began for output in core.step().outputs if output.tokens]
        return firsts

    def ttft_s(self, way: str) -> list[float]:
        self._disk.idle()
        decide(empty(self._core), way, self._rate)
        return self._run(self._requests)

    def skipped(self) -> str:
        return skipped(self._core)

    def close(self) -> None:
        self._core.close()


def skipped(core: EngineCore) -> str:
    state = core.stats().stores[1]
    return ", ".join([f"{state.loads} loads", *(f"{n} {why}" for why, n in state.skipped.items() if n)])


def measure(name: str, subject: Simulated | Real, rate: float, rounds: int) -> None:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds):
        for way in WAYS[:: -1 if round_ % 2 else 1]:
            found[way].append(summary(subject.ttft_s(way)))
    base = statistics.median(found[COMPUTE])
    ratios = [statistics.median([a / b for a, b in zip(found[way], found[COMPUTE], strict=True)]) for way in WAYS[1:]]
    cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"| {name} | {rate / 1e9:.3g} | {base:.2f} s | {cells} | {subject.skipped()} |", flush=True)


def written(folder: str, config: dict[str, Any]) -> Path:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(config))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the engine on this machine")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rates", default="0.1,0.4", help="of the disk, GB/s (%(default)s)")
    flags = parser.parse_args()
    rates = [float(rate) * 1e9 for rate in flags.rates.split(",")]
    names = ("shape", "GB/s", "P95 computed", *WAYS[1:], "in all")
    print("|", " | ".join(names), "|")
    print("|---" * len(names) + "|")
    if flags.real:
        config, tokens = WIDE
        with tempfile.TemporaryDirectory(prefix="kv-losing-") as folder:
            make = Path(__file__).parents[1] / "make_random_model.py"
            words = [sys.executable, str(make), folder + "/model", "--config", str(written(folder, config))]
            subprocess.run([*words, "--dtype", "float32"], check=True, stdout=subprocess.DEVNULL)
            for rate in rates:
                subject = Real(Path(folder) / "model", flags.prompts, tokens, 1 << 31, rate)
                measure("wide, real", subject, rate, flags.rounds)
                subject.close()
        return
    for name, (config, cost, tokens) in SHAPES.items():
        token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        equal = token_bytes / cost.per_token_ms * 1e3
        memory = 5 * flags.prompts * tokens * token_bytes // 4
        for rate in sorted([*rates, *(share * equal for share in (0.5, 0.8, 1.0, 1.25, 2.0))]):
            with tempfile.TemporaryDirectory(prefix="kv-losing-") as folder:
                path = written(folder, config).parent
                measure(name, Simulated(path, cost, flags.prompts, tokens, memory, rate), rate, flags.rounds)


if __name__ == "__main__":
    main()
