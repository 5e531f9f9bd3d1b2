"""Whether the machine is the cause: from what the kernel counts, planted in files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import machine
from engine.machine import MachineTimes, MachineUse, Meter, cpu_times, process_s, use

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Kernel:
    """Files of a machine whose CPUs 0 and 1 the process may use."""

    proc: Path
    cgroup: Path

    def thread(self, pid: int, tid: int, ran_s: float, waited_s: float, children: str = "") -> None:
        task = self.proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 5\n")
        (task / "children").write_text(children)

    def process(self, pid: int, used_s: float) -> None:
        fields = ["S", "1", *["0"] * 9, str(int(used_s * TICKS)), "0", "0", "0", *["0"] * 8]
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "stat").write_text(f"{pid} (a ) name) {' '.join(fields)}\n")

    def cpus(self, busy_s: float, steal_s: float = 0.0) -> None:
        """Each of CPUs 0 and 1 half of it; CPU 2 is not ours."""
        line = f"{busy_s / 2 * TICKS:.0f} 0 0 999 999 0 0 {steal_s / 2 * TICKS:.0f} 77 0"
        (self.proc / "stat").write_text(f"cpu 1 1\ncpu0 {line}\ncpu1 {line}\ncpu2 5 5 5 5 5 5 5 5 0 0\nctxt 5\n")

    def others(self, stalled_s: float, throttled_s: float) -> None:
        (self.proc / "pressure").mkdir(exist_ok=True)
        some = f"some avg10=44.23 avg60=14.65 avg300=3.89 total={stalled_s * 1e6:.0f}\n"
        (self.proc / "pressure" / "cpu").write_text(f"{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n")
        (self.proc / "loadavg").write_text("2.97 1.13 0.43 9/140 6930\n")
        (self.cgroup / "cpu.stat").write_text(f"usage_usec 5\nnr_throttled 3\nthrottled_usec {throttled_s * 1e6:.0f}\n")


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Kernel:
    (tmp_path / "proc").mkdir()
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return Kernel(tmp_path / "proc", tmp_path / "cgroup")


def meter(kernel: Kernel, pid: int = 7) -> Meter:
    return Meter(pid, kernel.proc, kernel.cgroup)


def at(monkeypatch, seconds: float) -> None:
    monkeypatch.setattr(machine.time, "monotonic", lambda: seconds)


def test_waits_of_all_threads_and_processes_of_an_engine_are_counted(kernel, monkeypatch):
    kernel.thread(7, 7, 1.0, 0.5, children="8 ")
    kernel.thread(8, 8, 2.0, 0.0)
    kernel.thread(8, 9, 2.0, 1.5)
    for pid in (7, 8):
        kernel.process(pid, 2.5)
    kernel.cpus(8.0, steal_s=1.0)
    kernel.others(stalled_s=3.0, throttled_s=0.5)
    found = meter(kernel)
    at(monkeypatch, 100.0)
    first = found.read()
    assert first == MachineTimes(100.0, 2, 5.0, 2.0, 3.0, 1.0, 0.5, 3.0, 2.97)
    kernel.thread(8, 9, 5.0, 5.5)
    kernel.process(8, 5.5)
    kernel.cpus(20.0, steal_s=2.0)
    kernel.others(stalled_s=6.0, throttled_s=1.5)
    at(monkeypatch, 110.0)
    between = use(first, found.read())
    assert between == MachineUse(2, pytest.approx(4 / 7), 0.9, 0.05, 0.1, pytest.approx(0.3), 2.97, 0.3)
    assert between.is_busy
    assert (
        between.words
        == "57% of its time without a core, others used 0.9 of 2 CPUs, steal 5%, stopped by its CPU limit 10%"
    )


def test_threads_that_end_or_take_anothers_number_lose_nothing(kernel):
    kernel.thread(7, 7, 1.0, 1.0)
    kernel.thread(7, 8, 3.0, 2.0)
    found = meter(kernel)
    found.read()
    for file in ("schedstat", "children"):
        (kernel.proc / "7" / "task" / "8" / file).unlink()
    (kernel.proc / "7" / "task" / "8").rmdir()
    assert (found.read().ran_s, found.read().waited_s) == (4.0, 3.0)
    kernel.thread(7, 7, 0.5, 0.25)  # a new process, of the same number
    last = found.read()
    assert (last.ran_s, last.waited_s) == (4.5, 3.25)


def test_what_a_system_does_not_count_is_none(kernel):
    found = meter(kernel).read()
    assert msg_fields(found) == [None] * 7
    assert use(found, found).words == "unknown: this system does not count it" and not use(found, found).is_busy
    kernel.thread(7, 7, 0.0, 0.0)  # a kernel that could count and does not
    assert meter(kernel).read().waited_s is None


def msg_fields(times: MachineTimes) -> list[float | None]:
    return [getattr(times, name) for name in MachineTimes.__struct_fields__[2:]]


@pytest.mark.parametrize(
    ("waiting", "others", "stolen", "throttled", "stalled", "busy"),
    [
        (0.30, 1.0, 0.0, None, 0.5, True),  # another process
        (0.30, 0.0, 0.1, None, 0.5, True),  # another virtual machine
        (0.30, 0.0, 0.0, 0.2, 0.5, True),  # its own CPU limit
        (0.30, 0.1, 0.0, None, 0.5, False),  # its own threads, more than cores
        (0.02, 1.0, 0.0, None, 0.5, False),  # others have cores of their own
        (0.30, None, None, None, None, True),  # nobody says who
        (None, 1.0, 0.0, None, 0.5, True),  # waits are not counted, but some process waited
        (None, 1.0, 0.0, None, 0.0, False),
        (None, 0.0, 0.1, None, None, True),
        (None, None, None, None, None, False),
    ],
)
def test_a_machine_is_busy_where_threads_waited_for_cores_that_others_had(
    waiting, others, stolen, throttled, stalled, busy
):
    assert MachineUse(2, waiting, others, stolen, throttled, stalled, 1.0).is_busy == busy


def test_a_moment_without_work_says_nothing_of_waits():
    idle = MachineTimes(0.0, 2, 1.0, 0.0, 0.0, 0.0), MachineTimes(1.0, 2, 1.001, 0.009, 1.5, 0.0)
    assert use(*idle).waiting is None and use(*idle).others == 1.5


def test_this_machine_is_read_as_it_is():
    times, own = cpu_times(sorted(os.sched_getaffinity(0))), process_s(os.getpid())
    assert times is not None and times[0] > own > 0.0
