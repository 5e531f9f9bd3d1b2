"""``engine bench --compare a.json b.json``: two results side by side, as ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import TOO_FEW
from engine_lab.bench.report import METRICS, show
from engine_lab.bench.result import SCHEMA, Result

IGNORED = frozenset({"nonce", "started", "url", "model", "load", "chars_per_token", "prompt_length_from"})
"""Parts of a run's config that may differ between comparable runs."""


def read_result(path: str) -> Result:
    """Raises ``ValueError`` if the file is not a result of ``engine bench --json``."""
    try:
        result = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--compare {path}: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"--compare {path}: expected a file written by engine bench --json ({SCHEMA})")
    return result


def rows(a: Result, b: Result) -> list[tuple[str, float | None, float | None, float | None]]:
    """(what, a, b, b / a) for every figure that is compared; the ratio is ``None`` where one is missing or a
    is 0."""
    figures: list[tuple[str, Any, Any]] = [
        (f"{label} {rank} (ms)", a["metrics"][key][rank], b["metrics"][key][rank])
        for key, label in METRICS
        for rank in ("p50", "p95", "p99")
    ]
    for key, label in (
        ("output_tokens_per_s", "output tokens/s"),
        ("prompt_tokens_per_s", "prompt tokens/s"),
        ("requests_per_s", "requests/s"),
    ):
        figures.append((label, a["throughput"][key], b["throughput"][key]))
    drafts = [r.get("drafting") or {} for r in (a, b)]
    for key, label in (("acceptance_rate", "drafts accepted"), ("mean_accepted_length", "mean accepted length")):
        x, y = (one.get(key) for one in drafts)
        if x is not None and y is not None:
            figures.append((label, x, y))
    if a["goodput"] and b["goodput"]:
        figures.append(("goodput (requests/s)", a["goodput"]["requests_per_s"], b["goodput"]["requests_per_s"]))
    return [(what, x, y, y / x if x and y is not None else None) for what, x, y in figures]


def warnings(a: Result, b: Result) -> list[str]:
    """What makes the comparison doubtful."""
    found = [f"{name} is INVALID: {reason}" for name, r in (("a", a), ("b", b)) for reason in r["invalid_reasons"]]
    for key in sorted((a["config"].keys() | b["config"].keys()) - IGNORED):
        x, y = a["config"].get(key), b["config"].get(key)
        if x != y:
            found.append(f"different {key}: {x} and {y}")
    for name, r in (("a", a), ("b", b)):
        if failed := r["requests"]["sent"] - r["requests"]["ok"]:
            found.append(f"{name}: {failed} of {r['requests']['sent']} requests failed and are not in the latencies")
    if any(r["metrics"][key]["count"] and r["metrics"][key]["p99"] is None for r in (a, b) for key, _ in METRICS):
        found.append(TOO_FEW)
    return found


def render_comparison(a: Result, b: Result) -> RenderableType:
    table = Table()
    table.add_column("")
    for name, result in (("a", a), ("b", b)):
        table.add_column(Text(f"{name}: {result['config']['model']}"), justify="right", overflow="fold")
    table.add_column("b / a", justify="right", no_wrap=True)
    for what, x, y, ratio in rows(a, b):
        table.add_row(what, *("-" if value is None else show(value) for value in (x, y)), show_ratio(ratio))
    return Group(table, *(Text(f"note: {line}") for line in warnings(a, b)))


def show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
