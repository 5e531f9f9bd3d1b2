"""The kernels' own test suites, on the card: the cases that Triton's interpreter runs on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from gpu_check.section import Context, Row
from gpu_check.standalone import REPOSITORY

SUITES = (
    "tests/kernels/triton",
    "tests/sampling/triton",
    "tests/plugins/attention_kernel/test_triton.py",
)
WITHOUT_CARD = ("--ignore-glob=*test_aot.py", "--ignore-glob=*test_models.py")
"""Files of these suites that run on a CPU."""
SPARE_S = 10.0
"""Kept of the budget to count what was done when the time is over."""
AT_ONCE = 4
"""Processes of each suite: compiling takes most of the time."""
OPTIONS = (
    "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-v", "-rN", "--tb=short", "--color=no",
    "-n", str(AT_ONCE),
)  # fmt: skip
OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|ERROR|SKIPPED)(?:\s|$)")


def run(context: Context) -> None:
    deadline = time.monotonic() + context.section.budget_s - SPARE_S
    started = []
    for number, suite in enumerate(SUITES):
        log = context.scratch / f"kernel_tests-{number}.txt"
        command = [sys.executable, "-m", "pytest", *OPTIONS, *WITHOUT_CARD, suite]
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
        started.append((suite, process, log))
    for suite, process, log in started:
        try:
            code: int | None = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        context.emit(summed_up(suite, code, log))


def summed_up(suite: str, code: int | None, log: Path) -> Row:
    """What a suite came to; ``code``: pytest's, or ``None`` when it was stopped."""
    lines = log.read_text(errors="replace").splitlines()
    outcomes = [match[1] for line in lines if "::" in line and (match := OUTCOME.search(line))]
    passed, bad = outcomes.count("PASSED"), outcomes.count("FAILED") + outcomes.count("ERROR")
    metric = f"pytest {suite}"
    if passed + bad == 0:
        why = lines[-1] if lines else "no output"
        return Row(metric, f"nothing ran: {why}"[:200], target="all pass", held=False, detail=lines[-30:])
    done = f"{passed} passed, {bad} failed" + ("" if code is not None else ", stopped when the time was over")
    held = False if bad or code not in (0, None) else None if code is None else True
    return Row(metric, done, target="all pass", held=held, detail=details(lines))


def details(lines: list[str]) -> list[str]:
    """Which tests failed, and what pytest says of why."""
    return [line for line in lines if " FAILED " in line or line.startswith("E  ")][:80]
