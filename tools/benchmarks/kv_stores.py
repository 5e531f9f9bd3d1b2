"""TTFT of a prompt whose beginning is computed, in the KV pool, in memory, or on a disk, beside what its bytes take.

    python tools/benchmarks/kv_stores.py MODEL [--tokens 4096] [--rounds 3] [--path FOLDER] [--set "threads=2"]

In turns, in one engine: the pool and the stores are emptied as each way needs it. "disk, cold" first drops the files
from the system's page cache. The floor of a way is one copy of the prompt's bytes, or one read of its files, plus a
step, in the same minute.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from engine.startup.build import build_engine

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ROOM = 1 << 30
"""Bytes of memory beyond a prompt's own."""


def ttft_ms(core: EngineCore, name: str, prompt: tuple[int, ...]) -> float:
    woken = threading.Event()
    core.wake = woken.set
    began = time.perf_counter()
    core.submit(EngineRequest(name, prompt, GREEDY))
    while core.has_work:
        if rest_s := core.rest_s():  # as the engine's own loop does
            woken.wait(rest_s)
            woken.clear()
        if any(output.tokens for output in core.step().outputs):
            break
    took = (time.perf_counter() - began) * 1e3
    while core.has_work:
        core.step()
    core.take_stored()
    return took


def empty(core: EngineCore, memory: bool) -> None:
    """Forget what is in the pool, and perhaps in memory; files stay."""
    pool = core._pool
    pool.allocator.reset_cache()
    if memory and pool.tiers is not None:
        pool.tiers._memory.store.clear()


def wait_for_files(core: EngineCore) -> None:
    """They are written behind: until none has come for two seconds."""
    records, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 2.0:
        core.take_stored()
        if (now := core.stats().stores[1].records) != records:
            records, since_s = now, time.monotonic()
        time.sleep(0.01)


def drop(files: list[Path]) -> None:
    """From the system's page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ms(files: list[Path]) -> float:
    buffer, began = bytearray(1 << 24), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return (time.perf_counter() - began) * 1e3


def copy_ms(num_bytes: int) -> float:
    source, target = bytearray(num_bytes), bytearray(num_bytes)
    began = time.perf_counter()
    memoryview(target)[:] = source
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, help="folder for files; default: a new one below the current folder")
    parser.add_argument("--set", default="", help="further overrides")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.path or Path.cwd(), prefix="kv-stores-") as folder:
        measure(flags, Path(folder))


def measure(flags: argparse.Namespace, folder: Path) -> None:
    core = build_engine(
        assemble(
            [
                *(f"model.path={flags.model}", "exporter=[]", f"memory.kv_tokens={2 * flags.tokens + 512}"),
                *(f"model.max_len={flags.tokens + 64}", "kv_store=[host,disk]", f"kv_store.disk.path={folder / 'kv'}"),
                *flags.set.split(),
            ]
        )
    ).core
    draw = random.Random(0)

    def new_prompt() -> tuple[int, ...]:
        return tuple(draw.randrange(3, 1000) for _ in range(flags.tokens + 1))

    ttft_ms(core, "warm", new_prompt()[:600])
    times: dict[str, list[float]] = {}

    def timed(way: str, took: float) -> None:
        times.setdefault(way, []).append(took)

    ways: list[tuple[str, Callable[[list[Path]], None]]] = [
        ("pool", lambda files: None),
        ("host", lambda files: empty(core, memory=False)),
        ("disk, warm", lambda files: empty(core, memory=True)),
        ("disk, cold", lambda files: (empty(core, memory=True), drop(files))[0]),
    ]
    wait_for_files(core)
    before = {file for file in (folder / "kv").rglob("*") if file.is_file()}
    for round_ in range(flags.rounds):
        prompt = new_prompt()
        timed("computed", ttft_ms(core, f"computed{round_}", prompt))
        wait_for_files(core)
        own = sorted({file for file in (folder / "kv").rglob("*") if file.is_file()} - before)
        before |= {*own}
        num_bytes = sum(file.stat().st_size for file in own)
        for way, prepare in ways:
            prepare(own)
            timed(way, ttft_ms(core, f"{way}{round_}", prompt))
        timed("copy of its bytes", copy_ms(num_bytes))
        timed("read of its files, warm", read_ms(own))
        drop(own)
        timed("read of its files, cold", read_ms(own))
    core.close()
    medians = {way: statistics.median(took) for way, took in times.items()}
    step, copy = medians["pool"], medians["copy of its bytes"]
    floors = {
        "host": copy + step,
        "disk, warm": medians["read of its files, warm"] + step,
        "disk, cold": medians["read of its files, cold"] + step,
    }
    print(f"{flags.tokens} tokens, {num_bytes / 1e6:.1f} MB in {len(own)} records, {flags.rounds} rounds, medians")
    for way, ms in medians.items():
        floor = f", {ms / floors[way]:.2f} times its floor and one step" if way in floors else ""
        gain = f", {medians['computed'] / ms:.1f} times sooner than computed" if way in (*floors, "pool") else ""
        print(f"{way:24} {ms:10.1f} ms{gain}{floor}")


if __name__ == "__main__":
    main()
