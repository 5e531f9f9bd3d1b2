"""Runs sections as child processes: side by side where that spoils nothing, each within its budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_check.registry import waves
from gpu_check.section import Row, Section, read_rows
from gpu_check.standalone import child_environment

TOOL = Path(__file__).resolve().parent
GRACE_S = 5.0
SAVE_S = 5.0
"""Whoever cuts the run off loses no more rows than those of so many seconds."""
Status = Literal["ok", "failed", "out of time", "not started", "cut off"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a section ended."""

    section: Section
    status: Status
    seconds: float
    rows: tuple[Row, ...]
    reason: str = ""
    """Of a failure: the last lines of its log."""

    @property
    def failed(self) -> bool:
        """A check failed, or it did not finish though that matters."""
        is_unfinished = self.status != "ok" and not self.section.is_optional
        return is_unfinished or any(row.failed for row in self.rows)

    @property
    def is_finished(self) -> bool:
        """A run that goes on need not repeat it."""
        return self.status == "ok" and not self.failed

    @property
    def is_closed_gate(self) -> bool:
        return self.section.is_gate and self.failed


def conduct(
    sections: Sequence[Section], scratch: Path, *, dry_run: bool, total_s: float, say: Callable[[str], None],
    save: Callable[[Sequence[Outcome]], object] = lambda outcomes: None,
) -> list[Outcome]:  # fmt: skip
    """Run all; never raises for what a section does. ``save`` is given what there is so far, every few seconds."""
    deadline = time.monotonic() + total_s
    outcomes: list[Outcome] = []
    for wave in waves(tuple(sections), dry_run):
        if closed := next((outcome.section.name for outcome in outcomes if outcome.is_closed_gate), None):
            outcomes += [Outcome(section, "not started", 0.0, (), f"{closed} failed") for section in wave]
            continue
        with ThreadPoolExecutor(_width(wave)) as pool:
            running = {pool.submit(run_section, section, scratch, dry_run, deadline): section for section in wave}
            while running:
                for future in wait(running, SAVE_S, FIRST_COMPLETED).done:
                    outcome = future.result()
                    del running[future]
                    outcomes.append(outcome)
                    name, rows = outcome.section.name, len(outcome.rows)
                    say(f"{name:17} {outcome.status:12} {outcome.seconds:6.1f} s, {rows} rows")
                save([*outcomes, *(cut_off(section, scratch) for section in running.values())])
    return outcomes


def cut_off(section: Section, scratch: Path) -> Outcome:
    """A section that is still running, if the run ends now."""
    return Outcome(section, "cut off", 0.0, read_rows(scratch, section.name), "the run ended before it did")


def _width(wave: Sequence[Section]) -> int:
    """How many at once: each section has a host thread that compiles or steps."""
    return max(1, min(len(wave), len(os.sched_getaffinity(0))))


def run_section(section: Section, scratch: Path, dry_run: bool, deadline: float) -> Outcome:
    """One child, killed with everything it started when its budget or the run's time is over."""
    started = time.monotonic()
    allowed = min(section.budget_s, deadline - started)
    if allowed <= 0:
        return Outcome(section, "not started", 0.0, (), "the time of the whole run was over")
    log = scratch / f"{section.name}.log"
    command = [sys.executable, str(TOOL), "--child", section.name, "--scratch", str(scratch)]
    environment = child_environment(scratch, **(dry_run_environment(section) if dry_run else {}))
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--dry-run"] if dry_run else command,
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(allowed)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    seconds, rows = time.monotonic() - started, read_rows(scratch, section.name)
    if code == 0:
        return Outcome(section, "ok", seconds, rows)
    reason = f"over its budget of {allowed:.0f} s" if code is None else f"exit code {code}"
    return Outcome(section, "out of time" if code is None else "failed", seconds, rows, f"{reason}; {tail(log)}")


def dry_run_environment(section: Section) -> dict[str, str]:
    """Environment of a section in a dry run. One thread: the shapes are tiny, and another section runs beside it."""
    return {"OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if section.interpreted else {})}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a child of ours and what it started: they share its session, and no one else is in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def end_with_parent() -> None:
    """Called by a child: end it, and what it started, soon after its parent is gone. A run that is cut off would
    leave it at work on the card."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def tail(log: Path, lines: int = 6) -> str:
    """The end of a log, on one line."""
    text = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in text[-lines:] if line.strip())[-800:]
