"""The machine fails the server: no file can be written, memory runs out, the clock jumps.

(a) No file can grow beyond 32 KiB, the log included. (b) In a control group,
another process takes memory until the kernel kills the engine (needs the right to make such groups). (c) The clock goes
an hour forth and two back during requests (needs ``cc``). Bar: what is answered is what a healthy server answers; a
killed engine is back once there is memory; no duration is negative or longer than what was waited.

    python -m tools.attack.machine --requests 400
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.attack.client import ask, once, request
from tools.attack.harness import CANARY, Row, Target, arguments, rss_mb, run, serve

FILE_BYTES = 32 * 1024
AT_ONCE = 8
JUMPS_S = (3600, -3600, 0)
CGROUPS = Path("/sys/fs/cgroup")
SPARE_MB = 100
HOG = """
import sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
taken = []
while True:
    taken.append(b"x" * 2**22)
    time.sleep(0.01)
"""
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("ATTACK_CLOCK"), O_RDONLY);
    void *mapped = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


async def full_disk(requests: int, overrides: list[str]) -> list[Row]:
    """(a)"""
    async with serve(*overrides) as target:
        for pid in (target.api_pid, target.engine_pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        wrong = 0
        for _ in range(0, requests, AT_ONCE):
            answers = await asyncio.gather(*(target.canary() for _ in range(AT_ONCE)))
            wrong += sum(answer != target.answer for answer in answers)
        full = target.log is not None and target.log.stat().st_size >= FILE_BYTES
    tried = f"{requests} requests, " + ("the log is full" if full else "the log is not full")
    return [Row("machine: full disk", tried, f"{wrong} answers differ", "0, a full log", full and not wrong)]


async def little_memory(overrides: list[str]) -> list[Row]:
    """(b)"""
    name = "machine: out of memory"
    try:
        group = _make_group()
    except OSError as error:
        return [Row(name, "not tried", f"no control group can be made: {error.strerror}", "ready again", None)]
    try:
        async with serve(*overrides, before=lambda: _enter(group)) as target:
            _limit_to(group, int(rss_mb(target.api_pid) + rss_mb(target.engine_pid)) + SPARE_MB)
            body = CANARY | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
            flight = asyncio.create_task(ask(target, "/v1/chat/completions", body))
            with _hog(group):
                begun = time.monotonic()
                while await target.is_ready() and time.monotonic() - begun < 60:
                    await asyncio.sleep(0.01)
                ended = await flight
            back_s = await target.until_ready()
            changed = await target.engine() != target.engine_pid and await target.same()
            tried = f"the engine is killed by the kernel, its stream ends: {ended.ending}"
            result = f"ready again after {back_s:.1f} s, " + ("the same answers" if changed else "answers differ")
            return [Row(name, tried, result, "error, ready again", changed and ended.ending in ("error", "broken"))]
    finally:
        group.rmdir()


async def jumping_clock(requests: int, overrides: list[str]) -> list[Row]:
    """(c)"""
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        folder = Path(name)
        (folder / "clock.c").write_text(CLOCK)
        offset, library = folder / "offset", folder / "clock.so"
        offset.write_bytes(struct.pack("l", 0))
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c"], check=True)
        except (OSError, subprocess.CalledProcessError):
            return [Row("machine: clock", "not tried", "there is no cc", "0", None)]
        environment = {"LD_PRELOAD": str(library), "ATTACK_CLOCK": str(offset)}
        async with serve(*overrides, environment=environment) as target:
            with offset.open("r+b", buffering=0) as clock:
                return await _jumps(target, clock.fileno(), requests)


async def _jumps(target: Target, clock: int, requests: int) -> list[Row]:
    wrong, odd, created = 0, 0, set()
    begun = time.monotonic()
    for i in range(0, requests, AT_ONCE):
        asked = [asyncio.create_task(_timed(target)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0.01)
        jump_s = JUMPS_S[i // AT_ONCE % len(JUMPS_S)]
        os.pwrite(clock, struct.pack("l", jump_s), 0)
        for answer, waited_ms, timings, stamp in await asyncio.gather(*asked):
            wrong += answer != target.answer
            odd += not all(-0.001 <= value <= waited_ms for value in timings)
            created.add(round((stamp - time.time()) / 3600))
    seconds = time.monotonic() - begun
    page = (await once(target, request("/metrics"))).body.decode()
    sums = [float(line.rpartition(" ")[2]) for line in page.splitlines() if "_seconds_sum" in line]
    odd += sum(not 0 <= value <= 2 * requests * seconds for value in sums)
    tried = f"{requests} requests while the clock goes to {', '.join(f'{s:+d} s' for s in JUMPS_S)}"
    result = f"{wrong} answers differ, {odd} odd durations, clients saw offsets of {sorted(created)} h"
    return [Row("machine: clock", tried, result, "0, 0", not wrong and not odd and len(created) == len(JUMPS_S))]


async def _timed(target: Target) -> tuple[str, float, list[float], int]:
    """The answer as the canary has it, ms until it came, the durations that the server states, ``created``."""
    begun = time.monotonic()
    reply = await once(target, request("/v1/chat/completions", CANARY))
    waited_ms = (time.monotonic() - begun) * 1e3
    shown = reply.json()
    durations = [
        value for name, value in shown["timings"].items() if name.endswith("_ms") and not isinstance(value, dict)
    ]
    return f"whole {reply.status}: {shown['choices'][0]['message']['content']}", waited_ms, durations, shown["created"]


def _make_group() -> Path:
    """A control group for memory. Raises ``OSError``."""
    version_1 = CGROUPS / "memory"
    group = (version_1 if version_1.is_dir() else CGROUPS) / f"engine-attack-{os.getpid()}"
    group.mkdir()
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _limit_to(group: Path, megabytes: int) -> None:
    name = "memory.limit_in_bytes" if group.parent.name == "memory" else "memory.max"
    (group / name).write_text(str(megabytes << 20))


@contextmanager
def _hog(group: Path) -> Iterator[None]:
    """Takes what memory the group has left; the kernel kills others first."""
    process = subprocess.Popen([sys.executable, "-c", HOG], preexec_fn=lambda: _enter(group))
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def main(options: argparse.Namespace) -> list[Row]:
    return [
        *await full_disk(options.requests, options.overrides),
        *await little_memory(options.overrides),
        *await jumping_clock(options.requests, options.overrides),
    ]


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, requests=400).parse_args(), main))
