"""Several loads, one after the other: given rates, or those below a saturation that is found first.

Saturation: a closed loop of 1, 2, 4, ... at once, until twice as many bring less than 5 % more requests per second.
The knee of a closed loop is the least number at once with 90 % of the most requests per second; that of rates the
highest one that the server keeps up with: requests end at 90 % or more of the rate at which they come. A sweep goes on
beyond its rates while it does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import TOO_FEW
from engine_lab.bench.client import Client, go_on
from engine_lab.bench.options import BenchOptions
from engine_lab.bench.report import ms, share, show
from engine_lab.bench.result import Result

SCHEMA = "engine-bench-sweep/1"
LEAST_GAIN = 1.05
KNEE_SHARE = KEPT_UP_SHARE = 0.9
GOOD_SHARE = 0.95
"""Of requests within ``--slo``."""
MOST_AT_ONCE = 1024
FURTHER, MOST_FURTHER = 1.1, 5
"""Beyond the rates of a sweep, while the server keeps up."""
FEWEST_ENDS = 5
"""For a rate of requests that end."""


async def measure(client: Client) -> Result:
    """The loads that the client's options ask for, up to an interruption."""
    options, steps, interrupted = client.options, list[Result](), False
    try:
        await _loads(client, steps)
    except asyncio.CancelledError:
        if not steps:
            raise
        interrupted = True
        go_on()
    return {
        "schema": SCHEMA,
        "config": {**client.describe(options), "load": "sweep" if options.sweep is not None else "rates"},
        "valid": all(step["valid"] for step in steps),
        "interrupted": interrupted or steps[-1]["interrupted"],
        "requests": {key: sum(step["requests"][key] for step in steps) for key in ("sent", "ok")},
        "rows": [row(step) for step in steps],
        "knees": knees([row(step) for step in steps]),
        "steps": steps,
    }


async def _loads(client: Client, steps: list[Result]) -> None:
    """Every load adds its result to ``steps``."""
    options, rates = client.options, list(client.options.rates)
    if options.sweep is not None:
        await _saturate(client, steps)
        most = max(map(ended_per_s, steps))
        rates = rates_below(min(ended_per_s(steps[0]), most / 2), most, options.sweep)
    for rate in rates:
        if not _is_over(steps):
            await _step(client, replace(options, rates=(), sweep=None, rate=rate), steps)
    further = 0
    while options.sweep is not None and further < MOST_FURTHER and not _is_over(steps) and row(steps[-1])["kept_up"]:
        further += 1
        rate = steps[-1]["config"]["rate"] * FURTHER
        await _step(client, replace(options, rates=(), sweep=None, rate=rate), steps)


async def _saturate(client: Client, steps: list[Result]) -> None:
    at_once, most = 1, 0.0
    while at_once <= MOST_AT_ONCE and not _is_over(steps):
        await _step(client, replace(client.options, sweep=None, concurrency=at_once), steps)
        found = ended_per_s(steps[-1])
        if found < most * LEAST_GAIN or steps[-1]["requests"]["failed"]:
            return
        at_once, most = 2 * at_once, max(most, found)


async def _step(client: Client, options: BenchOptions, steps: list[Result]) -> None:
    steps.append(await client.run(options, f"step {len(steps)}"))
    found = row(steps[-1])
    print(
        f"{found['load']}: {found['ended_per_s']:.2f} requests/s, TTFT P50 {ms(found['ttft_p50_ms'])} ms",
        file=sys.stderr,
    )


def _is_over(steps: Sequence[Result]) -> bool:
    return bool(steps) and (steps[-1]["interrupted"] or not steps[-1]["requests"]["ok"])


def rates_below(least: float, most: float, count: int) -> list[float]:
    """``count`` rates above ``least`` up to ``most``, denser towards it."""
    return [least + (most - least) * (1 - (1 - step / count) ** 2) for step in range(1, count + 1)]


def ended_per_s(result: Result) -> float:
    """Requests that ended per second, from the first end until the last request was due: without the time in which the
    server had no work yet, or no more. Of few, over the whole run."""
    ok = [record for record in result["records"] if not record["error"] and not record["left"]]
    ends = sorted(record["scheduled_s"] + record["e2e_ms"] / 1e3 for record in ok)
    last_due_s = max((record["scheduled_s"] for record in result["records"]), default=0.0)
    inside = [end for end in ends[1:] if end <= last_due_s]
    if len(inside) < FEWEST_ENDS:
        return float(result["throughput"]["requests_per_s"])
    return float(len(inside) / (last_due_s - ends[0]))


def came_per_s(result: Result) -> float | None:
    """At which rate requests were due; ``None`` of fewer than two."""
    due = [record["scheduled_s"] for record in result["records"]]
    return (len(due) - 1) / (max(due) - min(due)) if len(due) > 1 and max(due) > min(due) else None


def row(result: Result) -> dict[str, Any]:
    """A load in one line. Rates per second, times in milliseconds."""
    config, metrics, ended = result["config"], result["metrics"], ended_per_s(result)
    came = came_per_s(result) if config["rate"] is not None else None
    name = f"{config['rate']:.4g}/s" if config["rate"] is not None else f"{config['concurrency']} at once"
    return {
        "load": name,
        "rate": config["rate"],
        "concurrency": config["concurrency"],
        "came_per_s": came,
        "ended_per_s": ended,
        "kept_up": None if came is None else ended >= KEPT_UP_SHARE * came,
        "output_tokens_per_s": result["throughput"]["output_tokens_per_s"],
        **{f"{key}_{rank}_ms": metrics[f"{key}_ms"][rank] for key in ("ttft", "itl", "e2e") for rank in ("p50", "p95")},
        "goodput": result["goodput"],
        "ok": result["requests"]["ok"],
        "sent": result["requests"]["sent"],
        "valid": result["valid"],
    }


def knees(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The knee of each kind of load that there is, and the highest rate within the limits: which row, and in words how
    it was found."""
    found = []
    closed = [(i, each) for i, each in enumerate(rows) if each["rate"] is None]
    if len(closed) > 1:
        most_at, most = max(closed, key=lambda one: one[1]["ended_per_s"])
        index, knee = next(one for one in closed if one[1]["ended_per_s"] >= KNEE_SHARE * most["ended_per_s"])
        found.append(
            _knee(
                "closed loop",
                index,
                knee,
                f"the least at once with {KNEE_SHARE:.0%} of the most requests/s, {most['ended_per_s']:.2f} with "
                f"{rows[most_at]['load']}",
            )
        )
    kept = [(i, each) for i, each in enumerate(rows) if each["kept_up"]]
    if any(each["rate"] is not None for each in rows):
        why = f"the highest rate at which requests end {KEPT_UP_SHARE:.0%} as fast as they come, or faster"
        open_rows = [each for each in rows if each["rate"] is not None]
        if kept:
            index, knee = kept[-1]
            why += f": {knee['ended_per_s']:.2f} of {knee['came_per_s']:.2f}/s that came"
            if knee is open_rows[-1]:
                why += "; it is the highest that was tried: the knee may be above it"
            found.append(_knee("rates", index, knee, why))
        else:
            found.append({"kind": "rates", "row": None, "load": "", "ended_per_s": None, "how": f"none: {why}"})
    good = [
        (i, each) for i, each in enumerate(rows) if each["goodput"] and (each["goodput"]["share"] or 0) >= GOOD_SHARE
    ]
    if good:
        index, best = max(good, key=lambda one: one[1]["ended_per_s"])
        why = f"the most requests/s of which {GOOD_SHARE:.0%} or more keep {best['goodput']['slo']}"
        found.append(_knee("limits", index, best, why))
    return found


def _knee(kind: str, index: int, found: dict[str, Any], how: str) -> dict[str, Any]:
    return {"kind": kind, "row": index, "load": found["load"], "ended_per_s": found["ended_per_s"], "how": how}


def render(result: Result) -> RenderableType:
    """A row a load, and the knees with how they were found."""
    config, rows = result["config"], result["rows"]
    title = Text(f"{config['model']} at {config['url']}: {config['load']}; milliseconds")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("load", no_wrap=True)
    has_goodput = any(each["goodput"] for each in rows)
    last = ("good",) if has_goodput else ("E2E p50",)
    for name in ("ended/s", "tokens/s", "TTFT p50", "p95", "ITL p50", "p95", *last):
        table.add_column(name, justify="right", no_wrap=True)
    marks = {knee["row"]: "*" for knee in result["knees"]}
    for index, each in enumerate(rows):
        times = [ms(each[key]) for key in ("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms")]
        end = share(each["goodput"]) if has_goodput else ms(each["e2e_p50_ms"])
        name = name_of(each) + marks.get(index, "")
        style = "" if each["valid"] else "red"
        tokens = show(each["output_tokens_per_s"], 1) if each["output_tokens_per_s"] is not None else "-"
        table.add_row(name, show(each["ended_per_s"]), tokens, *times, end, style=style)
    return Group(table, *(Text(line) for line in notes(result)))


def name_of(found: dict[str, Any]) -> str:
    """The load, and whether the server fell behind it."""
    return f"{found['load']}{' behind' if found['kept_up'] is False else ''}"


def notes(result: Result) -> list[str]:
    """What is to be known beside the rows."""
    lines = [
        f"knee ({knee['kind']}): {knee['load']}, {knee['ended_per_s']:.2f} requests/s: {knee['how']}"
        if knee["row"] is not None
        else f"knee ({knee['kind']}): {knee['how']}"
        for knee in result["knees"]
    ]
    rows = result["rows"]
    if any(each["ttft_p95_ms"] is None and each["ok"] for each in rows):
        lines.append(TOO_FEW)
    if failed := sum(step["requests"]["sent"] - step["requests"]["ok"] for step in result["steps"]):
        lines.append(f"{failed} requests failed or were left; they count as not ended")
    late = [(each["load"], step["invalid_reasons"]) for each, step in zip(rows, result["steps"], strict=True)]
    late = [(load, reasons) for load, reasons in late if reasons]
    if late:
        lines.append(f"INVALID: {', '.join(load for load, _ in late)}: the client was late, as in: {late[0][1][0]}")
    if result["interrupted"]:
        lines.append("interrupted: the last row is of what had ended, and further loads are left out")
    return lines
