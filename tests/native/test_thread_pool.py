"""Jobs of several threads: every unit is computed once, whoever gets which, and nobody waits for who has none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import native
from tests.native import needs_compiler

pytestmark = needs_compiler

SOURCE = r"""
#include <sched.h>
#include <time.h>

#include <atomic>
#include <random>

#include "thread_pool.h"

constexpr int64_t MUCH = 1 << 20;  // work that several threads are worth

// counts: [units]
extern "C" void count_units(int64_t units, int64_t most, int32_t* counts, int64_t* largest) {
    std::atomic<int64_t> widest{0};
    parallel(units, most, MUCH, [&](Pieces& pieces) {
        while (pieces.take()) {
            const int64_t width = pieces.last - pieces.first;
            for (int64_t seen = widest; seen < width && !widest.compare_exchange_weak(seen, width);) {}
            for (int64_t unit = pieces.first; unit < pieces.last; unit++)
                __atomic_fetch_add(counts + unit, 1, __ATOMIC_RELAXED);
        }
    });
    *largest = widest;
}

// Jobs of random sizes, some of whose units take long; how many had a wrong sum.
extern "C" void many_jobs(int64_t jobs, int64_t seed, int64_t* wrong) {
    std::mt19937 random(seed);
    for (int64_t job = 0; job < jobs; job++) {
        const int64_t units = random() % 40, most = 1 + random() % 8;
        const bool naps = random() % 64 == 0;
        std::atomic<int64_t> sum{0};
        parallel(units, most, MUCH, [&](Pieces& pieces) {
            int64_t mine = 0;
            while (pieces.take()) {
                if (naps) sched_yield();
                for (int64_t unit = pieces.first; unit < pieces.last; unit++) mine += unit + 1;
            }
            sum += mine;
        });
        *wrong += sum != units * (units + 1) / 2;
    }
}

// Whoever takes the first unit holds it until another thread has computed all others, 10 s at most.
extern "C" void stuck(int64_t units, int64_t* others) {
    std::atomic<int64_t> done{0};
    parallel(units, 1, MUCH, [&](Pieces& pieces) {
        while (pieces.take()) {
            if (pieces.first > 0) { done++; continue; }
            const time_t end = time(nullptr) + 10;
            while (done < units - 1 && time(nullptr) < end) sched_yield();
            *others = done;
        }
    });
}

extern "C" void nested(int64_t units, int32_t* counts) {
    parallel_for(units, MUCH, [&](int64_t unit) {
        parallel_for(units, MUCH, [&](int64_t inner) { counts[unit * units + inner]++; });
    });
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "jobs.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def jobs(source: Path) -> Any:
    pointer, int64 = native.POINTER, native.INT64
    return native.load(
        source,
        {
            "count_units": (int64, int64, pointer, pointer),
            "many_jobs": (int64, int64, pointer),
            "stuck": (int64, pointer),
            "nested": (int64, pointer),
        },
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def workers() -> int:
    """Threads of this process that compute for others."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += (task / "comm").read_text().startswith("kernels-")
    return count


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("most", [1, 4, 1000])
def test_every_unit_is_computed_once_in_pieces_of_the_size_asked_for(jobs: Any, count: int, most: int) -> None:
    for units in (0, 1, 2, 7, 100, 1000):
        counts, largest = (ctypes.c_int32 * max(1, units))(), ctypes.c_int64()
        with threads(count):
            jobs.count_units(units, most, ctypes.addressof(counts), ctypes.addressof(largest))
        assert list(counts)[:units] == [1] * units
        assert largest.value <= most


@pytest.mark.parametrize("count", [2, 5])
def test_thousands_of_jobs_of_any_size_with_more_threads_than_cores(jobs: Any, count: int) -> None:
    wrong = ctypes.c_int64()
    with threads(count):
        jobs.many_jobs(5_000, count, ctypes.addressof(wrong))
    assert wrong.value == 0


def test_all_but_its_own_piece_is_computed_without_a_thread_that_is_stuck(jobs: Any) -> None:
    others = ctypes.c_int64(-1)
    with threads(2):
        jobs.stuck(50, ctypes.addressof(others))
    assert others.value == 49


def test_a_job_within_a_job_is_computed_by_its_thread_alone(jobs: Any) -> None:
    counts = (ctypes.c_int32 * 400)()
    with threads(3):
        jobs.nested(20, ctypes.addressof(counts))
    assert list(counts) == [1] * 400


def test_several_threads_have_jobs_at_once_and_their_workers_end_with_them(jobs: Any) -> None:
    """Ranks may be threads of one process."""
    before, wrong, there = workers(), [ctypes.c_int64(-1) for _ in range(3)], []

    def run(result: ctypes.c_int64) -> None:
        torch.set_num_threads(2)
        result.value = 0
        jobs.many_jobs(500, 7, ctypes.addressof(result))
        there.append(workers())

    ranks = [threading.Thread(target=run, args=(result,)) for result in wrong]
    with threads(2):
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert [result.value for result in wrong] == [0, 0, 0]
    assert max(there) > before
    end = time.monotonic() + 30.0
    while workers() > before and time.monotonic() < end:  # threads end a little after they were joined
        os.sched_yield()
    assert workers() == before


FORKS = """
import ctypes, os, sys
from pathlib import Path
from engine import native
pointer, int64 = native.POINTER, native.INT64
library = native.load(Path(sys.argv[1]), {"many_jobs": (int64, int64, pointer)})
wrong = ctypes.c_int64()
library.many_jobs(100, 1, ctypes.addressof(wrong))
child = os.fork()
library.many_jobs(100, 2, ctypes.addressof(wrong))
if child == 0:
    sys.exit(10 + wrong.value)  # through everything that runs at an exit
_, status = os.waitpid(child, 0)
sys.exit(100 * wrong.value + os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_has_workers_of_its_own_and_ends(source: Path, jobs: Any) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-P", "-c", FORKS, str(source)], env=environment, timeout=60, check=False)
    assert done.returncode == 10
