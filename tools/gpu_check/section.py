"""What a section is, what it is given, and what it hands back: rows, one per line of the final table."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS = "rates.json"
"""In the scratch folder: what the card can do, as measured by the first section."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check, run in a process of its own."""

    name: str
    module: str
    """Below ``gpu_check``; its ``run(context)`` emits rows."""
    doc: str
    budget_s: float
    """Killed after this long; what it emitted until then counts."""
    alone: bool = False
    """It measures time, so nothing may run beside it."""
    needs: tuple[str, ...] = ()
    gpu_only: bool = False
    """Left out of a dry run, by name."""
    argument: str = ""
    """For modules that serve several sections."""
    is_optional: bool = False
    """It checks nothing itself: whether it finishes does not matter."""
    is_gate: bool = False
    """Where it fails, the sections after it are not started."""
    interpreted: bool = False
    """In a dry run its Triton kernels run in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the final table."""

    metric: str
    measured: float | str | None = None
    """``None``: not measured, and ``detail`` says why."""
    unit: str = ""
    limit: float | None = None
    """What the hardware allows, in the same unit, from rates measured in the same run."""
    share: float | None = None
    """Of the limit, 0 to 1."""
    target: str = ""
    held: bool | None = None
    """``None``: nothing was promised."""
    is_check: bool = True
    """False: a speed target. Missing it is a finding and does not fail the run."""
    detail: Any = None
    """For the JSON report."""

    @property
    def failed(self) -> bool:
        return self.is_check and self.held is False


@dataclass(frozen=True, slots=True)
class Context:
    """What a section is given."""

    section: Section
    scratch: Path
    """Shared by all sections of a run, removed after it."""
    dry_run: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def rates(self) -> dict[str, float]:
        """``read_gb_s``, ``copy_gb_s`` and ``gemm_tflop_s``. Raises ``FileNotFoundError`` if they were not
        measured."""
        found: dict[str, float] = json.loads((self.scratch / FACTS).read_text())
        return found

    def emit(self, row: Row) -> None:
        """Hand back a row, at once: a section that is killed later keeps it."""
        with rows_file(self.scratch, self.section.name).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self.say(f"{row.metric}: {show_value(row)}")

    def say(self, text: str) -> None:
        """Into the section's log."""
        print(text, file=sys.stderr, flush=True)


def rows_file(scratch: Path, section: str) -> Path:
    return scratch / f"{section}.rows"


def read_rows(scratch: Path, section: str) -> tuple[Row, ...]:
    """What a section emitted; a line it was killed in the middle of is left out."""
    file = rows_file(scratch, section)
    if not file.exists():
        return ()
    whole = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return tuple(Row(**json.loads(line)) for line in whole)


def show_value(row: Row) -> str:
    """The measured value with its unit."""
    if row.measured is None:
        return "not measured"
    text = row.measured if isinstance(row.measured, str) else f"{row.measured:,.4g}"
    return f"{text} {row.unit}".strip()


def time_row(
    metric: str, ms: float, limit_ms: float, *, least_share: float | None = None, most_ms: float | None = None,
    detail: Any = None,
) -> Row:  # fmt: skip
    """A duration against the shortest the hardware allows; the target, if any, is ``least_share`` or ``most_ms``."""
    share, target, held = limit_ms / ms, "", None
    if least_share is not None:
        target, held = f">= {least_share:.0%} of the limit", share >= least_share
    elif most_ms is not None:
        target, held = f"<= {most_ms:g} ms", ms <= most_ms
    return Row(metric, ms, "ms", limit_ms, share, target, held, is_check=False, detail=detail)
