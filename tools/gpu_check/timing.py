"""Clocks: the device's for kernels, the host's for steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


CALLS = 10
"""Between two events, so that what the host takes to launch the first is not measured with it."""


def device_ms(call: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median time of one call in milliseconds, after three to warm up; on a CPU by the host's clock."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        if device == "cpu":
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def wall_s(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call, the device's work included."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started
