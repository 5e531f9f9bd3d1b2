"""Measurements on a machine that others use, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from engine.machine import cpu_times, process_s

PRIORITY = 10
"""Real-time: above all processes that have none."""
LEAST_S = 0.15
"""Of a measurement: the kernel counts in hundredths of a second."""
MOST_BUSY = 0.25
"""Processors that others may use meanwhile: the kernel keeps one twentieth of each for them, and they take what threads
of the measurement leave idle."""
REST_S = 0.3
"""Between two measurements, for others."""
TRIES = 100


def undisturbed(run: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of a run, the mean of at least ``repeats``. Raises as :func:`undisturbed_value`."""

    def taken() -> float:
        start, runs = time.perf_counter(), 0
        while runs < repeats or time.perf_counter() - start < LEAST_S:
            run()
            runs += 1
        return (time.perf_counter() - start) / runs

    return undisturbed_value(taken)


def undisturbed_value(measure: Callable[[], float], pids: Sequence[int] = ()) -> float:
    """What ``measure`` finds, for :data:`LEAST_S` or more, while this process and ``pids`` run before all others; again
    if others computed meanwhile all the same. Raises ``TimeoutError`` if they always do, ``PermissionError`` for users
    who may not set priorities."""
    processes = (os.getpid(), *pids)
    for _ in range(TRIES):
        time.sleep(REST_S)
        with first_in_line(processes):
            start, before = time.monotonic(), others_s(processes)
            found = measure()
            if others_s(processes) - before <= MOST_BUSY * (time.monotonic() - start):
                return found
    raise TimeoutError(f"other processes computed during {TRIES} measurements")


@contextmanager
def first_in_line(pids: Sequence[int]) -> Iterator[None]:
    """All threads of some processes have real-time priority."""
    _schedule(pids, os.SCHED_FIFO, PRIORITY)
    try:
        yield
    finally:
        _schedule(pids, os.SCHED_OTHER, 0)


def _schedule(pids: Sequence[int], policy: int, priority: int) -> None:
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def others_s(pids: Sequence[int]) -> float:
    """Seconds that all processors have computed, for other processes than ``pids`` and other virtual machines."""
    times = cpu_times(range(os.cpu_count() or 1))
    if times is None:
        raise OSError("/proc/stat does not say what each CPU has computed")
    return sum(times) - sum(map(process_s, pids))
