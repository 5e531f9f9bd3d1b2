"""The result of a run on the screen: a table, and a line for everything besides the latencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import TOO_FEW
from engine.machine import MachineUse
from engine_lab.bench.result import Result, at_worst

METRICS = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "ITL per token"),
    ("inter_chunk_ms", "ITL per event"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
)


def render(result: Result) -> RenderableType:
    """The result as a table with its notes."""
    config = result["config"]
    title = Text(f"{config['model']} at {config['url']}: {config['load']}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("milliseconds", no_wrap=True)
    for name in ("mean", "p50", "p95", "p99", "max", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in METRICS:
        values = result["metrics"][key]
        cells = [ms(values[name]) for name in ("mean", "p50", "p95", "p99", "max")]
        table.add_row(label, *cells, f"{values['count']:,}")
    parts: list[RenderableType] = [table, *_engines(result), *_parts(result), *(Text(line) for line in notes(result))]
    if not result["valid"]:
        parts += [Text(f"INVALID: {reason}", style="bold red") for reason in result["invalid_reasons"]]
    return Group(*parts)


def _engines(result: Result) -> list[RenderableType]:
    """What each of several engines served, as a table."""
    if not result["engines"]:
        return []
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("requests", "moved here", "output tokens", "TTFT p50", "p95", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine, served in result["engines"].items():
        tokens = "unknown" if served["output_tokens"] is None else f"{served['output_tokens']:,}"
        times = [ms(served["ttft_ms"][name]) for name in ("p50", "p95", "max")]
        table.add_row(engine, f"{served['requests']:,}", f"{served['moved_here']:,}", tokens, *times)
    return [table]


def _parts(result: Result) -> list[RenderableType]:
    """Classes of requests, and slices of time, a table each."""
    classes = [(name or "-", found) for name, found in (result.get("classes") or {}).items()]
    times = [(f"{found['from_s']:g} s", found) for found in result.get("slices") or ()]
    return [_part_table(title, rows) for title, rows in (("class", classes), ("from", times)) if rows]


def _part_table(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, max_width=14, overflow="fold")
    has_goodput = any(found["goodput"] for _, found in rows)
    names = ("ok", "sent", "TTFT p50", "p95", "ITL p50", "p95", "E2E p50", *(("good",) if has_goodput else ()))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in rows:
        times = [
            ms(found[key][rank])
            for key, rank in (
                ("ttft_ms", "p50"),
                ("ttft_ms", "p95"),
                ("itl_ms", "p50"),
                ("itl_ms", "p95"),
                ("e2e_ms", "p50"),
            )
        ]
        good = [share(found["goodput"])] if has_goodput else []
        table.add_row(name, f"{found['ok']:,}", f"{found['requests']:,}", *times, *good)
    return table


def share(good: dict[str, Any] | None) -> str:
    """Of requests that kept their limits."""
    return "-" if good is None or good["share"] is None else f"{good['share']:.1%}"


def notes(result: Result) -> list[str]:
    """Everything besides the latencies, a line each; names in a column of their own."""
    return [f"{name:<12}{text}" if name else text for name, text in facts(result)]


def facts(result: Result) -> list[tuple[str, str]]:
    """Everything besides the latencies: what it is of, and what it is; what is of the whole has no name."""
    requests, rates, tokens, client = (result[key] for key in ("requests", "throughput", "tokens", "client"))
    mean = f" ({tokens['prompt'] / requests['ok']:,.0f} each)" if tokens["prompt"] else ""
    cached = "" if tokens["cached"] is None else f", {tokens['cached']:,} of {tokens['prompt']:,} cached"
    found = [
        (
            "requests",
            f"{requests['ok']} of {requests['sent']} ok in {result['duration_s']:.1f} s, "
            f"{rates['requests_per_s']:.2f}/s",
        ),
        ("tokens", f"{show(rates['output_tokens_per_s'], 1)} output/s, {show(tokens['per_chunk'])} per event"),
        (
            "prompts",
            f"{show(rates['prompt_tokens_per_s'], 1)} tokens/s{mean}{cached}; lengths by "
            f"{result['config']['prompt_length_from']}",
        ),
        (
            "client",
            f"requests left late by {at_worst(client['send_lag_ms'])}, its event loop woke late by "
            f"{at_worst(client['loop_lag_ms'])} (limit {lag_limits(client)} ms)",
        ),
        *_seldom(result),
    ]
    if requests["ok"] and tokens["output"] is None:
        found.append(
            ("", "The server does not report token counts: ITL and TPOT are unknown (--tokenizer counts them).")
        )
    if any(values["count"] and values["p99"] is None for values in result["metrics"].values()):
        found.append(("", TOO_FEW))
    if result["interrupted"]:
        found.append(("", "interrupted: what was still running is left out"))
    failed = requests["failed"].items()
    return found + [("failed", f"{failure['count']} x {kind}: {failure['example']}") for kind, failure in failed]


def _seldom(result: Result) -> Iterator[tuple[str, str]]:
    """What not every run has."""
    if left := result["requests"]["left"]:
        yield "left", f"{left} clients went away before their answers ended; they are in no other figure"
    if (wait := result["held_ms"]) is not None:
        held = f"{wait['mean']:,.0f} ms on average, {wait['max']:,.0f} at most"
        yield (
            "held back",
            (f"{wait['count']:,} requests by the limit of those running, {held}; their latencies include it"),
        )
    if (drafts := result["drafting"]) and drafts["drafted"]:
        spent = "" if drafts["draft_share"] is None else f", {drafts['draft_share']:.1%} of decoding spent on them"
        yield (
            "drafts",
            (
                f"{drafts['acceptance_rate']:.1%} of {drafts['drafted']:,} accepted, mean accepted length "
                f"{drafts['mean_accepted_length']:.2f}{spent}"
            ),
        )
    if (good := result["goodput"]) is not None:
        kept = "unknown" if good["share"] is None else f"{good['share']:.1%}"
        yield "goodput", f"{show(good['requests_per_s'])} requests/s ({kept}) within {good['slo']}"
    if (machine := result["machine"]) is not None:
        use = msgspec.convert(machine, MachineUse)
        if use.is_busy:
            yield "machine", f"busy: {machine['whose']} spent {use.words}"


def lag_limits(client: dict[str, Any]) -> str:
    """Of both kinds of lag."""
    send, loop = f"{client['send_limit_ms']:.1f}", f"{client['limit_ms']:.1f}"
    return send if send == loop else f"{send} and {loop}"


def ms(value: float | None) -> str:
    """Nine characters up to a quarter of an hour."""
    return "-" if value is None else show(value, 0 if value >= 10_000 else 2)


def show(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"
