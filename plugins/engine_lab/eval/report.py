"""An evaluation as a table, as JSON, and as a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.startup.memory.report import size
from engine_lab.eval.options import Limits


@dataclass(frozen=True, slots=True)
class Row:
    """One plan's figures; ``None``: not measured."""

    label: str
    overrides: tuple[str, ...]
    slots: dict[str, str]
    """Plugin by slot."""
    dtype: str
    is_reference: bool = False
    tokens: int | None = None
    """Scored."""
    perplexity: float | None = None
    perplexity_increase: float | None = None
    """Relative to the reference."""
    kl: float | None = None
    agreement: float | None = None
    exact: float | None = None
    questions: int | None = None
    weights_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    requests: int = 0
    beside_bytes: int = 0
    """Memory that is neither weights nor KV pool, with so many requests."""


@dataclass(frozen=True, slots=True)
class Report:
    """The reference's row, if there is one, comes first."""

    model: str
    source: str
    """What was scored and asked, in words."""
    settings: dict[str, Any]
    request_tokens: int
    memory_bytes: int
    memory_fraction: float
    rows: tuple[Row, ...]
    limits: Limits
    notes: tuple[str, ...] = ()


def failures(report: Report) -> list[str]:
    """Where a plan is outside the stated tolerances, a line each."""
    limits, found = report.limits, []
    for row in report.rows:
        if row.is_reference:
            continue
        for name, value, limit, is_most in (
            ("perplexity increase", row.perplexity_increase, limits.perplexity_increase, True),
            ("KL", row.kl, limits.kl, True),
            ("agreement", row.agreement, limits.agreement, False),
            ("exact match", row.exact, limits.exact, False),
        ):
            if limit is None:
                continue
            if value is None or not (value <= limit if is_most else value >= limit):
                word = "at most" if is_most else "at least"
                shown = "was not measured" if value is None else f"{value:.6g}"
                found.append(f"{row.label}: {name} {shown}, wanted {word} {limit:g}")
    return found


def render(report: Report) -> RenderableType:
    """A table and what one must know to read it."""
    table = Table(title=Text(report.model), title_justify="left")
    table.add_column("plan", overflow="fold")
    for name in columns(report):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        label = f"{row.label} (reference)" if row.is_reference else row.label
        table.add_row(Text(label), *cells(report, row))
    lines = [report.source, *report.notes, *(f"OUTSIDE: {line}" for line in failures(report))]
    return Group(table, *(Text(line, style="bold red" if line.startswith("OUTSIDE") else "") for line in lines))


def columns(report: Report) -> list[str]:
    """What there is to show."""
    names = []
    if any(row.perplexity is not None for row in report.rows):
        names += ["perplexity", "change", "KL, nats", "top-1"]
    if any(row.exact is not None for row in report.rows):
        names.append("exact")
    return [*names, "weights", "KV/token", "requests"]


def cells(report: Report, row: Row) -> list[str]:
    """The row of :func:`columns`."""
    texts = {
        "perplexity": _shown(row.perplexity, ".4f"),
        "change": _shown(row.perplexity_increase, "+.3%"),
        "KL, nats": _shown(row.kl, ".5f"),
        "top-1": _shown(row.agreement, ".2%"),
        "exact": _shown(row.exact, ".1%"),
        "weights": size(row.weights_bytes),
        "KV/token": f"{row.kv_bytes_per_token / 2**10:.4g} KiB",
        "requests": f"{row.requests:,}",
    }
    return [texts[name] for name in columns(report)]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
