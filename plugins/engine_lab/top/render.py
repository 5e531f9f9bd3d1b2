"""A frame as text: everything below each other on 80 columns, in two halves from 148 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.startup.memory.report import size
from engine_lab.shared.live import short_ids
from engine_lab.top import frame as frames
from engine_lab.top.poll import REQUESTS
from engine_lab.top.sparkline import bar, sparkline

WIDE = 148
UNKNOWN = "-"
READY = "ready"
SERIES_BESIDE = 40
"""Cells of a row of :func:`series` that are not its line."""
FEWEST_SLOWEST = 3
"""Lines."""
PERIODS = Text("last 5 s: rates; 60 s: lines, steps, prefix, drafts, machine; 5 min: percentiles", style="dim")
KV_FULL = 0.9
SERIES = (
    ("output", "output_tokens", "tok/s", "green"),
    ("prefill", "prefill_tokens", "tok/s", "cyan"),
    ("ended", "requests", "req/s", "blue"),
    ("running", "running", "", "green"),
    ("waiting", "waiting", "", "yellow"),
)


def render(title: Text, frame: frames.Frame, width: int, height: int | None = None) -> RenderableType:
    """``height``: lines of the terminal, which the slowest requests fill up; ``None``: ten of them."""
    half = (width - 4) // 2 if width >= WIDE else width
    cores = machine(frame)
    # A fleet's rows are too long for a half.
    beneath = [*not_serving(frame), *elsewhere(frame)]
    whole: list[RenderableType] = [fleet(frame), *beneath, Text()] if frame.engines else []
    beside: list[RenderableType] = [] if frame.engines else [measured(frame), Text()]
    left, right = series(frame, half), Group(*beside, kept(frame, half), *cores)
    above: list[RenderableType]
    if width >= WIDE:
        halves = Table.grid(padding=(0, 4, 0, 0))
        halves.add_column(width=half)
        halves.add_column(width=half)
        halves.add_row(left, right)
        above, lines = [title, PERIODS, halves, Text(), *whole], 13 + len(frame.kv)
    else:
        above, lines = [title, left, PERIODS, *whole, right, Text()], 18 + len(frame.kv)
    # Its rows, instead of those of one engine.
    lines += len(frame.engines) - 3 + len(beneath) if frame.engines else 0
    lines += sum(len(line.wrap(Console(), half)) for line in cores)
    room = 10 if height is None else max(FEWEST_SLOWEST, height - lines)
    return Group(*above, slowest(frame.slowest, width, room))


def series(frame: frames.Frame, width: int) -> Table:
    """Numbers now, their last minute as a line, and its maximum."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", width=7)
    table.add_column(justify="right", width=9)
    table.add_column(width=5)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    for label, name, unit, color in SERIES:
        now = getattr(frame.rates, name) if hasattr(frame.rates, name) else getattr(frame, name)
        values = frame.series[name]
        digits = 1 if unit else 0
        line = sparkline(values, min(60, width - SERIES_BESIDE)) if len(values) > 1 else ""
        top = f"max {number(max(values), digits)}" if line and any(values) else ""
        table.add_row(label, number(now, digits), unit, Text(line, style=color), top)
    return table


def measured(frame: frames.Frame) -> Table:
    """Percentiles, and beside them the parts that a mean step adds up from."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", width=6)
    for width in (10, 10, 10, 8, 2):
        table.add_column(justify="right", width=width)
    table.add_column(style="bold", width=9)
    table.add_column(justify="right", width=9)
    of_minute = frame.minute
    beside = (
        ("= gap", number(of_minute.gap_ms, 2)),
        ("+ device", number(of_minute.device_ms, 2)),
        ("+ host", number(of_minute.host_ms, 2)),
        ("+ in line", number(of_minute.in_line_ms, 2)),
        ("batch", number(of_minute.batch, 1)),
    )
    head = [Text(text, style="dim") for text in ("ms", "P50", "P95", "P99", "n", "")]
    table.add_row(*head, "step ms", number(of_minute.step_ms, 2))
    for name, other in zip(frames.LATENCIES, beside, strict=True):
        found = frame.latency[name]
        label = name.removesuffix("_ms")
        label = label if label == "queue" else label.upper()
        shown = (number(value, 2) for value in (found.p50, found.p95, found.p99))
        table.add_row(label, *shown, f"{found.n:,}", "", *other)
    return table


def fleet(frame: frames.Frame) -> Table:
    """A row for each engine, and one for what adds up."""
    table = Table.grid(padding=(0, 1, 0, 0))
    columns = (
        *(("engine", 10), ("run", 4), ("wait", 5), ("KV", 5), ("tok/s", 9), ("cached", 6)),
        *(("TTFT 50", 8), ("P95", 8), ("ITL 50", 7), ("P95", 7)),
    )
    for name, width in columns:
        table.add_column(no_wrap=True, width=width, justify="left" if name == "engine" else "right")
    table.add_row(*(Text(name, style="dim") for name, _ in columns))
    for engine, each in (*frame.engines.items(), ("all", frame)):
        state = frame.states.get(engine, READY)
        leased, total = sum(group.leased for group in each.kv), sum(group.total for group in each.kv)
        ttft, itl = each.latency.get("ttft_ms"), each.latency.get("itl_ms")
        times = () if ttft is None or itl is None else (ttft.p50, ttft.p95, itl.p50, itl.p95)
        table.add_row(
            Text(engine, style="bold" if state == READY else "bold red"),
            number(each.running, 0),
            number(each.waiting, 0),
            share(leased / total if total else None),
            number(each.rates.output_tokens, 1),
            share(each.minute.prefix_hit_rate),
            *(number(value, 1) for value in times),
        )
    return table


def elsewhere(frame: frames.Frame) -> list[Text]:
    """A line for each engine on another machine than the server."""
    return [Text(f"{engine}: {where}", style="dim") for engine, where in frame.hosts.items()]


def not_serving(frame: frames.Frame) -> list[Text]:
    """A line with the engines that take no requests, and why; none where all do."""
    others = [f"{engine} ({state})" for engine, state in frame.states.items() if state != READY]
    return [Text(f"not ready: {', '.join(others)}", style="bold red", no_wrap=True)] if others else []


def kept(frame: frames.Frame, width: int) -> Table:
    """KV groups, prefix cache and drafts."""
    table = Table.grid(padding=(0, 1, 0, 0))
    labels = max((len(group.group) + 3 for group in frame.kv), default=7)
    table.add_column(style="bold", no_wrap=True, min_width=7)
    table.add_column(no_wrap=True)
    for group in frame.kv:
        leased, cached = (blocks / max(1, group.total) for blocks in (group.leased, group.cached))
        said = f" {share(leased):>5} used, {share(cached):>5} cached, {group.total:,} blocks"
        cells = bar((("█", leased), ("▒", cached)), max(10, min(40, width - labels - len(said) - 2)))
        style = "red" if leased > KV_FULL else "green"
        table.add_row(Text(f"KV {group.group}"), Text.assemble((cells, style), said))
    for store in frame.stores:
        said = f"{size(store.num_bytes)} of {size(store.most_bytes)}, {store.loaded_tokens:,} tokens loaded"
        table.add_row(f"KV {store.name}", said + (f", {store.faults:,} faults" if store.faults else ""))
    of_minute = frame.minute
    hits = f"{share(of_minute.prefix_hit_rate)} of prompt tokens were cached"
    if of_minute.preemptions:
        hits += f"; {of_minute.preemptions} preemptions"
    table.add_row("prefix", hits)
    length = number(of_minute.mean_accepted_length, 2)
    table.add_row("drafts", f"{share(of_minute.acceptance)} accepted, mean accepted length {length}")
    return table


def machine(frame: frames.Frame) -> list[Text]:
    """What the engine's threads had of the cores; red where the machine is a cause of what is slow."""
    found = frame.minute.machine
    if found is None:
        return []
    return [Text.assemble(("machine ", "bold"), (found.words, "bold red" if found.is_busy else ""))]


def slowest(requests: Sequence[dict[str, Any]], width: int, room: int) -> Table:
    """A row for each request, as many as fit into so many lines, one at least. Narrow ones wrap the cause, leave out
    columns for it, and have ids by their ends."""
    wide = width >= WIDE
    table = Table.grid(padding=(0, 1, 0, 0))
    times, kinds = (("slowest", 12), ("TTFT", 7)), ("prompt", "cached", "output")
    columns = (*times, ("TPOT", 6), *((kind, 6) for kind in kinds)) if wide else (*times, ("prompt", 6))
    for _, cells in columns:
        table.add_column(justify="right", no_wrap=True, width=cells)
    ids = 43 if wide else 10
    cause_width = width - sum(cells + 1 for _, cells in columns) - ids - 2
    table.add_column(width=cause_width, overflow="fold")
    table.add_column(no_wrap=True, width=ids)
    heads = (*(name for name, _ in columns), f"cause (of the last {REQUESTS} requests)", "request")
    table.add_row(*(Text(name, style="dim") for name in heads))
    for at, request in enumerate(requests):
        cause, name = request["cause"], request["request_id"]
        said = Text(cause if wide else short_ids(cause))
        room -= len(said.wrap(Console(), cause_width))
        if room < 0 and at > 0:
            break
        shown = {
            "slowest": f"{request['total_ms']:,.0f} ms",
            "TTFT": number(request["ttft_ms"], 0),
            "TPOT": number(request["tpot_ms"], 1 if (request["tpot_ms"] or 0.0) < 1000.0 else 0),
            **{kind: f"{request[f'{kind}_tokens']:,}" for kind in kinds},
        }
        table.add_row(*(shown[column] for column, _ in columns), said, Text(name if wide else short_ids(name)))
    return table


def number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"
