"""Whether this machine has a core for who wants to compute: what the kernel counts, in seconds since it began to.

Waits on a run queue are counted for each thread (``schedstat``), so they tell of a machine that others use, too, better
than how busy it is: an engine may use all cores of a quiet one. Whatever a system does not count is ``None``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
BUSY_WAITING = 0.05
"""Of the time that threads wanted a core: from here on the machine is named as a cause, if others took the core."""
BUSY_OTHERS = 0.25
"""CPUs that others use: less is a client, a shell, a daemon."""
BUSY_TAKEN = 0.02
"""Of the time of all CPUs, taken by the hypervisor, or of a control group's limit."""
LEAST_S = 0.05
"""Of computing or waiting: less says nothing of a machine."""


class MachineTimes(msgspec.Struct, frozen=True):
    """Counters of one moment; two of them make a :class:`MachineUse`."""

    at_s: float
    """Of the monotonic clock."""
    cpus: int
    """That the process may use."""
    ran_s: float | None = None
    """Threads of the processes in question, on a core."""
    waited_s: float | None = None
    """The same, ready to run and without one."""
    others_s: float | None = None
    """Other processes, on these CPUs."""
    stolen_s: float | None = None
    """Other virtual machines, on these CPUs."""
    throttled_s: float | None = None
    """That a limit of the control group stopped it."""
    stalled_s: float | None = None
    """That some process of the machine waited for a core (pressure stall information)."""
    load: float | None = None
    """Processes that ran or wanted to, over the last minute: no counter."""


class MachineUse(msgspec.Struct, frozen=True):
    """Between two moments. Shares are 0 to 1; ``None``: not known."""

    cpus: int
    waiting: float | None
    """Of the time that the threads wanted a core, without one."""
    others: float | None
    """CPUs that other processes used, on average."""
    stolen: float | None
    """Of the time of all CPUs."""
    throttled: float | None
    """Of the time."""
    stalled: float | None
    """Of the time."""
    load: float | None
    used: float | None = None
    """CPUs that the threads used, on average."""

    @property
    def is_busy(self) -> bool:
        """Whether the machine is a cause of what is slow: threads waited for a core that somebody else had. Where
        waits are not counted, whether somebody else had one while some process waited."""
        taken = [share for share in (self.stolen, self.throttled) if share is not None]
        by_others = self.others is not None and self.others >= BUSY_OTHERS
        if self.waiting is None:
            return any(share >= BUSY_WAITING for share in taken) or (by_others and (self.stalled or 0.0) >= BUSY_OTHERS)
        nobody_known = self.others is None and not taken
        somebody = by_others or any(share >= BUSY_TAKEN for share in taken) or nobody_known
        return self.waiting >= BUSY_WAITING and somebody

    @property
    def words(self) -> str:
        """After "the engine spent"."""
        parts = (
            "" if self.waiting is None else f"{self.waiting:.0%} of its time without a core",
            "" if self.others is None else f"others used {self.others:.1f} of {self.cpus} CPUs",
            "" if not self.stolen else f"steal {self.stolen:.0%}",
            "" if not self.throttled else f"stopped by its CPU limit {self.throttled:.0%}",
        )
        return ", ".join(filter(None, parts)) or "unknown: this system does not count it"


def use(before: MachineTimes, after: MachineTimes) -> MachineUse:
    """What happened between two readings of one machine."""
    seconds = after.at_s - before.at_s

    def gained(name: str) -> float | None:
        first, second = getattr(before, name), getattr(after, name)
        return None if first is None or second is None else max(0.0, second - first)

    def share(name: str, of: float) -> float | None:
        value = gained(name)
        return None if value is None or of <= 0.0 else value / of

    ran, waited = gained("ran_s"), gained("waited_s")
    wanted = 0.0 if ran is None or waited is None else ran + waited
    return MachineUse(
        cpus=after.cpus,
        waiting=None if waited is None or wanted < LEAST_S else waited / wanted,
        others=share("others_s", seconds),
        stolen=share("stolen_s", seconds * after.cpus),
        throttled=share("throttled_s", seconds),
        stalled=share("stalled_s", seconds),
        load=after.load,
        used=share("ran_s", seconds),
    )


class Meter:
    """Reads the counters: threads are those of a process and of all that it has started."""

    def __init__(self, pid: int | None = None, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        """``pid``: this process's, unless it is given."""
        self._pid, self._proc, self._cgroup = pid or os.getpid(), proc, cgroup
        self._cpus = sorted(os.sched_getaffinity(0))
        self._reading = threading.Lock()
        self._threads: dict[Path, tuple[float, float]] = {}
        self._ran_s = self._waited_s = 0.0

    def read(self) -> MachineTimes:
        """Takes some 50 microseconds a thread. May be called from any thread."""
        with self._reading:
            pids = self._count()
            at_s, ran_s, waited_s = time.monotonic(), self._ran_s, self._waited_s
        times = cpu_times(self._cpus, self._proc)
        load = _text(self._proc / "loadavg")
        return MachineTimes(
            at_s=at_s,
            cpus=len(self._cpus),
            ran_s=ran_s or None,  # a kernel that could count but does not says 0
            waited_s=waited_s if ran_s else None,
            others_s=times and times[0] - sum(process_s(pid, self._proc) for pid in pids),
            stolen_s=times and times[1],
            throttled_s=_microseconds(self._cgroup / "cpu.stat", "throttled_usec "),
            stalled_s=_microseconds(self._proc / "pressure" / "cpu", "total="),
            load=float(load.split()[0]) if load else None,
        )

    def _count(self) -> set[int]:
        """Adds what threads have run and waited since the last reading; returns the processes."""
        found, pids = {}, set()
        for pid, task in self._tasks(self._pid):
            pids.add(pid)
            if not (text := _text(task / "schedstat")):
                continue
            ran, waited = (int(field) / 1e9 for field in text.split()[:2])
            before = self._threads.get(task, (0.0, 0.0))
            if ran < before[0]:  # another thread, of the same number
                before = (0.0, 0.0)
            self._ran_s += ran - before[0]
            self._waited_s += waited - before[1]
            found[task] = ran, waited
        self._threads = found
        return pids

    def _tasks(self, pid: int) -> Iterator[tuple[int, Path]]:
        folder = self._proc / str(pid) / "task"
        try:
            tasks = sorted(folder.iterdir())
        except OSError:  # it has ended
            return
        for task in tasks:
            yield pid, task
            for child in _text(task / "children").split():
                yield from self._tasks(int(child))


def cpu_times(cpus: Collection[int], proc: Path = PROC) -> tuple[float, float] | None:
    """Seconds that these CPUs have computed, and that the hypervisor had them for others; ``None`` where the system
    does not say."""
    lines = (line.split() for line in _text(proc / "stat").splitlines() if line.startswith("cpu"))
    ticks = {name: [int(field) for field in fields] for name, *fields in lines}
    found = [ticks[name] for cpu in cpus if (name := f"cpu{cpu}") in ticks]
    if len(found) < len(cpus):
        return None
    busy = sum(sum(user[:3]) + sum(user[5:7]) for user in found)  # all but idle, iowait and steal; guests are in user
    return busy / _TICKS, sum(sum(fields[7:8]) for fields in found) / _TICKS


def process_s(pid: int, proc: Path = PROC) -> float:
    """Seconds that a process has computed, with the children that it has waited for; 0 of one that has ended."""
    fields = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


_TICKS = os.sysconf("SC_CLK_TCK")


def _text(file: Path) -> str:
    """Empty where there is none, or no more."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _microseconds(file: Path, name: str) -> float | None:
    """The first number after ``name``, in seconds."""
    number = _text(file).partition(name)[2].split()
    return int(number[0]) / 1e6 if number else None
