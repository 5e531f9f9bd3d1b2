"""A comparison of drafters as tables, as JSON, and as a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine_lab.eval.drafting.figures import Figures

SHOWN_DIFFERENCES = 5
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the one given without drafts."""

    label: str
    batch: int
    prompt: str
    position: int
    """Of the first different token in the output, from 0."""
    wanted: int | None
    """Token id; ``None``: the output had ended."""
    found: int | None

    def __str__(self) -> str:
        prompt = self.prompt if len(self.prompt) <= SHOWN_CHARACTERS else f"{self.prompt[:SHOWN_CHARACTERS]}..."
        wanted, found = ("the end" if token is None else str(token) for token in (self.wanted, self.found))
        return (
            f"{self.label}, batch {self.batch}: output token {self.position} is {found}, without drafts {wanted}; "
            f"prompt {prompt!r}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one batch size."""

    label: str
    overrides: tuple[str, ...]
    batch: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Report:
    """``rows``: by batch size, the engine without drafts first."""

    model: str
    dtype: str
    prompts: str
    """The file."""
    asked: dict[str, int]
    """Prompts by batch size: those that fill whole batches."""
    pairs: int
    answer_tokens: int
    max_slowdown: float | None
    rows: tuple[Row, ...]
    compared: int
    """Answers held against those without drafts."""
    differences: tuple[Difference, ...]

    @property
    def must_be_equal(self) -> bool:
        """In float32, greedy outputs do not depend on how many tokens a step computes."""
        return self.dtype == "float32"


def failures(report: Report) -> list[str]:
    """What is wrong, a line each."""
    found = []
    if report.differences and report.must_be_equal:
        found = [str(difference) for difference in report.differences[:SHOWN_DIFFERENCES]]
        if len(report.differences) > SHOWN_DIFFERENCES:
            found.append(f"{len(report.differences) - SHOWN_DIFFERENCES} more answers differ")
    for row in report.rows:
        bound = row.figures.slowdown_bound
        if report.max_slowdown is not None and bound is not None and bound > report.max_slowdown:
            found.append(
                f"{row.label}, batch {row.batch}: time per token up to {bound:.3f} of that without drafts (mean "
                f"{row.figures.slowdown:.3f}), wanted at most {report.max_slowdown:g}"
            )
    return found


def render(report: Report) -> RenderableType:
    """How fast, why, and what was compared."""
    lines = [Text(line) for line in notes(report)]
    wrong = [Text(f"WRONG: {line}", style="bold red") for line in failures(report)]
    return Group(_speeds(report), _reasons(report), *lines, *wrong)


def _table(title: str, report: Report, names: Sequence[str]) -> Table:
    table = Table(title=Text(f"{report.model}, {report.dtype}: {title}"), title_justify="left")
    table.add_column("batch", justify="right")
    table.add_column("drafter", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, report: Report, row: Row, cells: Sequence[str]) -> None:
    is_last = row is report.rows[-1] or report.rows[report.rows.index(row) + 1].batch != row.batch
    label = " ".join(word.removeprefix("drafter=").removeprefix("drafter.") for word in row.label.split())
    table.add_row(str(row.batch), Text(label), *cells, end_section=is_last)


def _speeds(report: Report) -> Table:
    names = ("tokens/step", "draft", "verify", "rest", "ms/token", "speed-up", "time/none")
    table = _table("milliseconds of a decode step, and of a token", report, names)
    for row in report.rows:
        f = row.figures
        time = _shown(f.slowdown, ".3f") if f.slowdown_bound is None else f"{f.slowdown:.3f} <= {f.slowdown_bound:.3f}"
        parts = [f"{ms:.3f}" for ms in (f.draft_ms, f.verify_ms, f.rest_ms, f.ms_per_token)]
        _add(table, report, row, [f"{f.tokens_per_step:.2f}", *parts, _shown(f.speed_up, ".2f"), time])
    return table


def _reasons(report: Report) -> Table:
    table = _table("why", report, ("k", "c", "k*c", "v", "ideal", "reached", "accepted by position, %"))
    for row in report.rows:
        f = row.figures
        if f.speed_up is None:
            continue
        accepted = " ".join("-" if share is None else f"{share:.0%}"[:-1] for share in f.acceptance) or "-"
        costs = [_shown(f.num_draft_tokens, ".2f"), _shown(f.draft_cost, ".3f"), _shown(f.drafting_cost, ".2f")]
        costs.append(_shown(f.verify_cost, ".2f"))
        _add(table, report, row, [*costs, _shown(f.ideal, ".2f"), _shown(f.reached, ".0%"), accepted])
    return table


def notes(report: Report) -> list[str]:
    """What one must know to read the tables."""
    asked = ", ".join(f"{count} at batch {batch}" for batch, count in report.asked.items())
    lines = [
        f"{report.prompts}: {asked}, answered greedily to their end or {report.answer_tokens} tokens, {report.pairs} "
        "times, the engines in turn; steps in which all requests decode",
        "time/none: mean over passes <= upper end of its 95 % interval. ideal = tokens/step / (k*c + v): k drafts a "
        "decode step, c and v a draft and a step in steps of none; reached: speed-up of that",
    ]
    if not report.differences:
        lines.append(f"all {report.compared} answers equal those without drafts, token for token")
    elif not report.must_be_equal:
        lines.append(
            f"{len(report.differences)} of {report.compared} answers differ from those without drafts. In "
            f"{report.dtype} a step of several tokens rounds otherwise than one of a single token, which decides "
            "between tokens that are almost equally likely; with model.dtype=float32 all must be equal. The first:"
        )
        lines.append(f"  {report.differences[0]}")
    return lines


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
