"""Where the time of an answer went, as ``/engine/requests/ID`` has it."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from engine_lab.chat.summary import counted
from engine_lab.shared.live import short_ids

FULL = "█"
BESIDE = 31
"""Cells of a row that are not its bar and what it says."""


def waterfall(sequence: dict[str, Any], width: int) -> Group:
    """A row for each span with a bar from its start to its end, and what went on meanwhile."""
    total = sequence["total_ms"]
    bar = max(10, min(60, (width - BESIDE) // 3))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, width=12)
    table.add_column(justify="right", no_wrap=True, width=5)
    table.add_column(no_wrap=True, width=bar, style="cyan")
    table.add_column(style="dim")
    for span in sequence["spans"]:
        shares = (span["start_ms"] / total, span["ms"] / total) if total else (0.0, 0.0)
        offset = min(bar - 1, round(bar * shares[0]))
        length = min(bar - offset, max(1, round(bar * shares[1])))
        shown = Text(" " * offset + FULL * length)
        table.add_row(span["name"], f"{span['ms']:,.2f} ms", f"{100 * shares[1]:.0f} %", shown, _detail(span))
    table.add_row("total", f"{total:,.2f} ms", "", "", f"{abs(sequence['unattributed_ms']):.2f} ms unattributed")
    lines = [f"cause: {sequence['cause']}"]
    if prefix := sequence.get("prefix"):
        lines.append(f"prefix cache: {sequence['cached_tokens']} of {sequence['prompt_tokens']} prompt tokens")
        lines[-1] += f"; {prefix['why']}"
    return Group(table, *(Text(line) for line in lines))


def _detail(span: dict[str, Any]) -> str:
    parts = []
    if span.get("steps"):
        parts.append(counted(span["steps"], "step"))
    if chunks := [inside for inside in span.get("inside", ()) if inside["name"] == "chunk"]:
        parts.append(f"{sum(chunk['num_tokens'] for chunk in chunks)} tokens in {counted(len(chunks), 'chunk')}")
    if span.get("gap_ms"):
        parts.append(f"device idle {span['gap_ms']:.1f} ms")
    if others := span.get("blocked_by"):
        parts.append(f"beside {others['num_tokens']} prompt tokens of {short_ids(others['request_id'])}")
    if lost := span.get("preempted"):
        parts.append(f"preempted {counted(len(lost), 'time')}")
    return ", ".join(parts)
