"""What a section is, what it is given, and what it hands back: rows, one per line of the final table."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check import best_known
from gpu_check.floors import Bars, Work, sheet_rates

FACTS = "rates.json"
"""In the scratch folder: what the card can do, as measured by the first section."""
CARD = "card.txt"
"""In the scratch folder: the card's name in the table of data sheets; empty or missing if it is in none."""


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
    floor: float | None = None
    """What the card's data sheet allows, in the same unit. For a card without one: the limit."""
    best_known: dict[str, Any] | None = None
    """``value``, in the same unit, and what it is the best ``of``; ``None``: none is known. :meth:`Context.emit`
    fills it in."""
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

    @property
    def is_done(self) -> bool:
        """A run that goes on need not measure it again."""
        return self.measured is not None and not self.failed

    @property
    def is_figure(self) -> bool:
        """It has a size; other rows are checks, and their target is their bar."""
        return self.floor is not None or (
            not isinstance(self.measured, str | None) and not (self.is_check and self.target)
        )


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

    @property
    def card(self) -> str:
        """The card's name in the table of data sheets, or nothing."""
        file = self.scratch / CARD
        return file.read_text() if file.exists() else ""

    def bars(self, work: Work) -> Bars:
        """Milliseconds that this work takes at least. A section that needs no rates may have no limit."""
        sheet, measured = sheet_rates(self.card), (self.scratch / FACTS).exists()
        limit = work.ms(self.rates) if measured else None
        return Bars(limit, work.ms(sheet) if sheet else limit)

    def emit(self, row: Row) -> None:
        """Hand back a row, at once: a section that is killed later keeps it."""
        row = dataclasses.replace(row, best_known=best_known.find(row.metric, self.card, row.floor))
        with rows_file(self.scratch, self.section.name).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self.say(f"{row.metric}: {show_value(row)}{show_bars(row)}")

    def has(self, *metrics: str) -> bool:
        """Whether a run that is gone on with has all of these rows."""
        there = {row.metric for row in read_rows(self.scratch, self.section.name)}
        return there.issuperset(metrics)

    def say(self, text: str) -> None:
        """Into the section's log."""
        print(text, file=sys.stderr, flush=True)


def rows_file(scratch: Path, section: str) -> Path:
    return scratch / f"{section}.rows"


def read_rows(scratch: Path, section: str) -> tuple[Row, ...]:
    """What a section emitted, of each metric the last; a line it was killed in the middle of is left out."""
    file = rows_file(scratch, section)
    if not file.exists():
        return ()
    whole = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
    rows = [Row(**json.loads(line)) for line in whole]
    return tuple({row.metric: row for row in rows}.values())


def write_rows(scratch: Path, section: str, rows: Iterable[Row]) -> None:
    """As if the section had emitted them."""
    lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rows]
    rows_file(scratch, section).write_text("".join(lines))


def show_value(row: Row) -> str:
    """The measured value with its unit."""
    if row.measured is None:
        return "not measured"
    return row.measured if isinstance(row.measured, str) and not row.unit else in_unit(row, row.measured)


def in_unit(row: Row, value: float | str) -> str:
    """A value with the row's unit."""
    text = value if isinstance(value, str) else f"{value:,.4g}"
    return f"{text} {row.unit}".strip()


def show_floor(row: Row) -> str:
    """Nothing for a check."""
    if not row.is_figure:
        return ""
    return "none" if row.floor is None else in_unit(row, row.floor)


def show_best(row: Row) -> str:
    """Nothing for a check."""
    if not row.is_figure:
        return ""
    return "none known" if row.best_known is None else in_unit(row, row.best_known["value"])


def show_bars(row: Row) -> str:
    """What stands beside a figure where there is no table."""
    if not row.is_figure:
        return f" ({row.target})" if row.target else ""
    of = f", {row.best_known['of']}" if row.best_known else ""
    return f" (floor {show_floor(row)}; best known {show_best(row).removesuffix(' known')}{of})"


def time_row(
    metric: str, ms: float, bars: Bars, *, least_share: float | None = None, most_ms: float | None = None,
    detail: Any = None, unit: str = "ms",
) -> Row:  # fmt: skip
    """A duration against the shortest the hardware allows, all in one unit; the target, if any, is ``least_share`` of
    the limit or ``most_ms``."""
    share, target, held = None if bars.limit is None else bars.limit / ms, "", None
    if least_share is not None:
        target, held = f">= {least_share:.0%} of the limit", share is not None and share >= least_share
    elif most_ms is not None:
        target, held = f"<= {most_ms:g} ms", ms <= most_ms
    return Row(metric, ms, unit, bars.limit, share, bars.floor, None, target, held, is_check=False, detail=detail)
