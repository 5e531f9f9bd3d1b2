"""The figures as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import TOO_FEW

LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")
SETS = 3
"""Plugin sets beside each other: their figures then fit 80 columns."""


def render(result: Mapping[str, Any]) -> RenderableType:
    sets = result["sets"]
    tables = [_table(sets[first : first + SETS]) for first in range(0, len(sets), SETS)]
    parts: list[RenderableType] = [*tables, *(_verdicts(each) for each in sets[1:])]
    parts += [*_measured(result), *_assumed(result)]
    if any(each[name]["p99"] is None for each in sets for name in LATENCIES):
        parts.append(Text(TOO_FEW, style="dim"))
    return Group(*parts)


def _table(sets: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="simulated", title_justify="left")
    table.add_column("")
    for each in sets:
        table.add_column(escape(" ".join(each["overrides"])) or "as given", justify="right", overflow="fold")
    for label, values in _rows(sets):
        table.add_row(label, *values)
    return table


def _measured(result: Mapping[str, Any]) -> list[Text]:
    """Where step costs are from: a line for all sets if it is a file, or one for each."""
    file, words = result["calibration"]["file"], result["calibration"]["measured_on"]
    if file is not None:
        return [Text("measured: " + ", ".join(filter(None, (file, words[0]))), style="dim")]
    names = [" ".join(each["overrides"]) or "as given" for each in result["sets"]]
    return [Text(f"measured, {name}: {said}", style="dim") for name, said in zip(names, words, strict=True)]


def _rows(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    rows = [
        ("requests (refused)", [f"{s['requests']} ({s['refused']})" for s in sets]),
        ("output tokens/s", [f"{s['output_tokens_per_s']:.1f}" for s in sets]),
        ("prompt tokens cached", [f"{s['cached_share']:.1%}" for s in sets]),
        *_of_stores(sets),
    ]
    for name in LATENCIES:
        for figure in ("mean", "p50", "p95", "p99"):
            label = f"{name[:-3].upper()} {figure if figure == 'mean' else figure.upper()} (ms)"
            rows.append((label, [_ms(s[name], figure) for s in sets]))
    parts = sets[0]["ttft_parts_ms"]
    rows += [(f"TTFT: {part}, mean (ms)", [f"{s['ttft_parts_ms'][part]:.2f}" for s in sets]) for part in parts]
    rows += [
        ("device busy", [f"{_mean(s, 'busy'):.0%}" for s in sets]),
        ("most KV in use", [f"{max(e['most_kv_used'] for e in s['engines']):.0%}" for s in sets]),
        ("preemptions", [str(s["preemptions"]) for s in sets]),
    ]
    for name in sorted({name for each in sets for name in each.get("classes", ())}):
        rows.append((f"first token in time, {name}", [_in_time(each, name) for each in sets]))
    if "slo" in sets[0]:
        rows.append((f"good/s ({sets[0]['slo']})", [f"{s['goodput_per_s']:.2f}" for s in sets]))
    return rows


def _of_stores(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Where cached tokens came from, and what became of records."""
    names = list(dict.fromkeys(name for each in sets for name in each.get("stores", ())))
    rows = []
    for name in ("pool", *names) if names else ():
        tokens = [(s["prompt_tokens"].get(name, 0), s["prompt_tokens"]["all"]) for s in sets]
        rows.append((f"cached in {name}", [f"{own / total:.1%}" if total else "-" for own, total in tokens]))
    for name in names:
        of_sets = [s.get("stores", {}).get(name) for s in sets]
        rows.append((f"{name}: loads", ["-" if store is None else str(store["loads"]) for store in of_sets]))
        rows.append((f"{name}: evictions", ["-" if store is None else str(store["evicted"]) for store in of_sets]))
    return rows


def _assumed(result: Mapping[str, Any]) -> list[Text]:
    """A line for each KV store of each set that no set before has."""
    stores = [store for of_set in result["kv_stores"] for store in of_set]
    return [Text(line, style="dim") for line in dict.fromkeys(map(_assumption, stores))]


def _assumption(store: Mapping[str, Any]) -> str:
    rate = f"{store['bytes_per_s'] / 1e9:g} GB/s {store['rate_is']}"
    if not store["stands_in"]:
        return f"kv_store={store['name']}: the plugin itself; {rate}, between it and the KV pool"
    most = store["most_bytes"]
    bound = "without a bound" if most is None else f"of {most / 2**20:,.0f} MiB"
    return (
        f"kv_store={store['name']}: simulated, empty at the start, the least recently used makes way, {bound}; "
        f"{rate}, each way; other settings of it are not simulated"
    )


def _verdicts(each: Mapping[str, Any]) -> Table:
    table = Table(title=f"{escape(' '.join(each['overrides']))}, against the first", title_justify="left")
    for heading in ("", "ratio", "95 % interval", ""):
        table.add_column(heading)
    for verdict in each["against_first"]:
        ratio, bounds = verdict["ratio"], verdict["interval"]
        shown = "" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"
        table.add_row(verdict["measure"], "" if ratio is None else f"{ratio:.3f}", shown, verdict["verdict"])
    return table


def _ms(described: Mapping[str, Any], figure: str) -> str:
    value = described[figure]
    return "-" if value is None else f"{value:.2f}"


def _in_time(figures: Mapping[str, Any], name: str) -> str:
    counts = figures.get("classes", {}).get(name)
    return "-" if counts is None else f"{counts['in_time']} of {counts['requests']}"


def _mean(figures: Mapping[str, Any], name: str) -> float:
    engines = figures["engines"]
    return float(sum(engine[name] for engine in engines) / len(engines))
