"""Latency of an all_reduce between processes on this machine, by communicator, ranks and bytes.

    python tools/benchmarks/collectives.py [--ranks 2 4] [--communicators shm gloo] [--passes 5] [--first]

Every rank is a process on a core of its own, as far as there are as many. All communicators are there at once and take
turns, size by size, pass by pass; calls follow each other without a pause, in bfloat16. Times are rank 0's, of single
calls: median and 95th percentile over all passes. ``program``: native calls without Python between them, the mean of
20. Beside them: what copying as many bytes once takes, at the rate at which one core copies 64 MiB.

``--first``: with real-time priority while it measures, on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from quiet import MOST_BUSY, first_in_line, others_s
from torch import Tensor

from engine.assembly import values
from engine.assembly.discovery import discover
from engine.contracts.communicator import Communicator, NativeCommunicator, World
from engine.contracts.config import CommunicatorConfig, PluginSettings
from engine.native import in_one
from engine.testing.context import build_context

BYTES = (8, 256, 4096, 16_384, 65_536, 262_144, 1 << 20, 4 << 20)
LEAST_CALLS, MOST_CALLS, BURST_S = 20, 1500, 0.1
IN_PROGRAM = 20
TRIES = 20
COPIED = 64 << 20
GROUP = "world"
Times = dict[tuple[str, int], list[float]]
"""Seconds of calls, by way and bytes."""


def made(name: str) -> Communicator:
    """A built-in communicator."""
    offers = discover(PluginSettings(third_party=False)).of_slot("communicator")
    (offer,) = (one for one in offers if one.name == name)
    built: Communicator = values.load(offer.provider.factory)(CommunicatorConfig(), build_context())
    return built


def rank_process(connection: Connection, rank: int, size: int, names: list[str], passes: int, first: bool) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world = World(rank, size, {GROUP: tuple(range(size))}, "cpu", timeout_s=120.0)
    communicators = {name: made(name) for name in names}
    connection.send({name: one.invite(world) for name, one in communicators.items()} if rank == 0 else os.getpid())
    for name, invitation in connection.recv().items():
        communicators[name].start(world, invitation)
    found = measure(communicators, world, passes, first)
    connection.send(found)
    connection.recv()  # or who is done would end the calls of others
    for one in communicators.values():
        one.close()


def measure(communicators: dict[str, Communicator], world: World, passes: int, first: bool) -> Times:
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    next(iter(communicators.values())).all_gather(torch.tensor([os.getpid()]), GROUP, pids)
    found: Times = defaultdict(list)
    for _ in range(passes):
        for count in BYTES:
            x = torch.ones(count // 2, dtype=torch.bfloat16)
            for name, communicator in communicators.items():
                call = single_call(communicator, x)
                found[name, count] += burst(call, communicator, world, [int(pid) for pid in pids], first)
                if isinstance(communicator, NativeCommunicator):
                    calls = in_one([communicator.all_reduce_call(x, GROUP)] * IN_PROGRAM)
                    times = burst(calls, communicator, world, [int(pid) for pid in pids], first)
                    found[f"{name}, program", count] += [each / IN_PROGRAM for each in times]
    return dict(found)


def single_call(communicator: Communicator, x: Tensor) -> Callable[[], Any]:
    return lambda: communicator.all_reduce(x, GROUP)


def burst(
    call: Callable[[], Any], communicator: Communicator, world: World, pids: list[int], first: bool
) -> list[float]:
    """Seconds of each of many calls; once more where others computed meanwhile, as rank 0 sees it."""
    for _ in range(5):
        call()
    start = time.perf_counter()
    for _ in range(5):
        call()
    number = BURST_S / ((time.perf_counter() - start) / 5)
    number = agreed(communicator, int(min(max(number, LEAST_CALLS), MOST_CALLS)))
    for _ in range(TRIES):
        if first:
            time.sleep(0.05)  # for others
        times = []
        priority: AbstractContextManager[Any] = first_in_line([os.getpid()]) if first else nullcontext()
        with priority:
            call()
            started, before = time.perf_counter(), others_s(pids) if world.rank == 0 else 0.0
            for _ in range(number):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            elapsed = time.perf_counter() - started
            others = others_s(pids) - before if world.rank == 0 else 0.0
        if not agreed(communicator, int(first and others > MOST_BUSY * elapsed)):
            break
    return times


def agreed(communicator: Communicator, number: int) -> int:
    """Rank 0's."""
    return int(communicator.broadcast(torch.tensor([number]), GROUP, 0)[0])


def copy_rate(first: bool) -> float:
    """Bytes that one core copies in a second: the best of ten."""
    source, to = torch.ones(COPIED, dtype=torch.uint8), torch.empty(COPIED, dtype=torch.uint8)
    torch.set_num_threads(1)
    priority: AbstractContextManager[Any] = first_in_line([os.getpid()]) if first else nullcontext()
    times = []
    with priority:
        for _ in range(10):
            start = time.perf_counter()
            to.copy_(source)
            times.append(time.perf_counter() - start)
    return COPIED / min(times)


def run(size: int, names: list[str], passes: int, first: bool) -> Times:
    """Rank 0's times."""
    processes, connections = [], []
    context = get_context("spawn")
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(target=rank_process, args=(there, rank, size, names, passes, first))
        process.start()
        processes.append(process)
        connections.append(here)
    invitations, *_ = [connection.recv() for connection in connections]
    for connection in connections:
        connection.send(invitations)
    found: list[Times] = [connection.recv() for connection in connections]
    for connection in connections:
        connection.send("close")
    for process in processes:
        process.join()
    return found[0]


def spelled(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count >> 10} KiB" if count < 1 << 20 else f"{count >> 20} MiB"


def report(size: int, times: Times, rate: float) -> None:
    ways = list(dict.fromkeys(way for way, _ in times))
    print(f"\n{size} ranks, us: median (95th percentile)\n")
    print("| bytes | " + " | ".join(ways) + " | one copy |\n|---|" + "---|" * (len(ways) + 1))
    for count in BYTES:
        cells = []
        for way in ways:
            found = sorted(times[way, count])
            cells.append(f"{statistics.median(found) * 1e6:.1f} ({found[int(0.95 * len(found))] * 1e6:.1f})")
        print(f"| {spelled(count)} | " + " | ".join(cells) + f" | {count / rate * 1e6:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--communicators", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--first", action="store_true", help="with real-time priority")
    chosen = parser.parse_args()
    rate = copy_rate(chosen.first)
    print(f"{len(os.sched_getaffinity(0))} cores; one core copies {rate / 1e9:.1f} GB/s")
    for size in chosen.ranks:
        report(size, run(size, chosen.communicators, chosen.passes, chosen.first), rate)


if __name__ == "__main__":
    main()
