"""What ranks do in the tests of this folder."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.contracts.communicator import Communicator, CommunicatorError, World
from engine.native import in_one
from engine.testing.communicator import SUMMED, sample

COUNTS = (1, 3, 17, 255, 4099, 16_385, 70_001, 262_143)


def sums(communicator: Communicator, world: World) -> list[bytes]:
    """The bytes of many sums."""
    results = []
    for dtype in SUMMED:
        for count in COUNTS:
            x = sample(31 * world.rank + count, (count,), dtype)
            x[: count // 2] *= 1e-40 if dtype != "float16" else 1e-7  # some that are smaller than any normal number
            own = [count // world.size] * world.size
            own[-1] += count - sum(own)
            scattered = communicator.reduce_scatter(x, "world", own)
            parts = [torch.empty(n, dtype=x.dtype) for n in own]
            communicator.all_gather(scattered, "world", parts)
            communicator.all_reduce(x, "world")
            results += [y.view(torch.uint8).numpy().tobytes() for y in (x, torch.cat(parts))]
    return results


def sum_until_an_error(communicator: Communicator, world: World, *, busy: Connection) -> dict[str, Any]:
    """Sums, gathers and messages until one fails: what it says, who is missing, after how many seconds."""
    began, number = time.monotonic(), 0
    try:
        while True:
            number += 1
            began = time.monotonic()
            x = sample(number + world.rank, ((1, 1000, 100_003)[number % 3],), "float32")
            communicator.all_reduce(x, "world")
            communicator.all_gather(x, "world", [torch.empty_like(x) for _ in range(world.size)])
            if world.rank == number % world.size:
                communicator.send(x, (world.rank + 1) % world.size)
            if (world.rank - 1) % world.size == number % world.size:
                communicator.recv(x, (world.rank - 1) % world.size)
            if number == 50 and world.rank == 0:
                busy.send("busy")
    except CommunicatorError as error:
        waited_s = time.monotonic() - began
        began = time.monotonic()
        try:
            communicator.all_reduce(torch.ones(3), "world")
            again = "a call after the error came to its end"
        except CommunicatorError as second:
            again = str(second)
        return {
            "said": str(error), "ranks": error.ranks, "waited_s": waited_s, "again": again,
            "again_s": time.monotonic() - began, "begun": communicator.begun,
        }  # fmt: skip


def stay_in_a_program(communicator: Any, world: World, *, busy: Connection) -> str:
    """Native sums in one program that never comes to its end: what ``check`` says."""
    x = torch.ones(64)
    program = in_one([communicator.all_reduce_call(x, "world")] * 1000)
    if world.rank == 0:
        busy.send("busy")
    try:
        while True:
            program()
            communicator.check()
    except CommunicatorError as error:
        return str(error)


def many_calls(communicator: Communicator, world: World, *, count: int) -> float:
    """A number that all ranks add up to, call after call; the last is returned."""
    x = torch.zeros(8)
    for _ in range(count):
        x.fill_(1.0)
        communicator.all_reduce(x, "world")
        if not bool((x == world.size).all()):
            return -1.0
    return float(x[0])
