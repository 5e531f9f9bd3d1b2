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
COLUMNS = 3
"""Of figures: they then fit 80 columns."""
MEASURED = "measured"


def render(result: Mapping[str, Any]) -> RenderableType:
    sets = [each for each in result["sets"] if "why_not" not in each]
    columns = {" ".join(each["overrides"]) or "as given": each for each in sets}
    if result["measured"] is not None:
        columns = {MEASURED: result["measured"], **columns}
    names = list(columns)
    parts: list[RenderableType] = []
    for first in range(0, len(names), COLUMNS):
        parts.append(_table({name: columns[name] for name in names[first : first + COLUMNS]}))
    parts += [_verdicts(each) for each in sets[1:]]
    parts += _left_out(result)
    if result["measured"] is not None:
        parts.append(_apart(result["measured"], sets[0]))
    parts += [*_assumptions(result), *_assumed(result)]
    if any(each[name]["p99"] is None for each in sets for name in LATENCIES):
        parts.append(Text(TOO_FEW, style="dim"))
    return Group(*parts)


def _table(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="simulated", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right", overflow="fold")
    for label, values in _rows(list(columns.values())):
        table.add_row(label, *values)
    return table


def _left_out(result: Mapping[str, Any]) -> list[Text]:
    return [
        Text(f"not simulated: {' '.join(each['overrides'])}: {each['why_not']}", style="bold yellow")
        for each in result["sets"]
        if "why_not" in each
    ]


def _apart(measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> Text:
    """How far the first set's figures are from those of the trace."""
    told = []
    for name in LATENCIES:
        for figure in ("mean", "p50", "p95"):
            real, said = measured[name][figure], simulated[name][figure]
            if real and said is not None:
                told.append(
                    f"{name[:-3].upper()} {figure if figure == 'mean' else figure.upper()} {said / real - 1:+.0%}"
                )
    return Text(f"simulated as given against measured: {', '.join(told)}")


def _assumptions(result: Mapping[str, Any]) -> list[Text]:
    """Of the first set, and of others what is not the same."""
    file, lines = result["calibration"]["file"], []
    if file is not None:
        lines.append(f"calibration: {file}")
    sets = [each for each in result["sets"] if "why_not" not in each]
    first = result["assumptions"][0]
    for each, assumptions in zip(sets, result["assumptions"], strict=True):
        of_set = ", ".join(["", " ".join(each["overrides"])]) if each["overrides"] else ""
        known = first if of_set else ()
        lines += [f"{a['origin']}{of_set}: {a['name']}: {a['words']}" for a in assumptions if a not in known]
    return [Text(line, style="dim") for line in lines]


def _rows(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """What was measured has fewer figures."""
    rows = [
        ("requests (refused)", [f"{s['requests']} ({s.get('refused', 0)})" for s in sets]),
        ("output tokens/s", [f"{s['output_tokens_per_s']:.1f}" for s in sets]),
        ("prompt tokens cached", [f"{s['cached_share']:.1%}" for s in sets]),
        *_of_stores(sets),
    ]
    for name in LATENCIES:
        for figure in ("mean", "p50", "p95", "p99"):
            label = f"{name[:-3].upper()} {figure if figure == 'mean' else figure.upper()} (ms)"
            rows.append((label, [_ms(s[name], figure) for s in sets]))
    parts = sets[0]["ttft_parts_ms"]
    rows += [(f"TTFT: {part}, mean (ms)", [_part(s["ttft_parts_ms"][part]) for s in sets]) for part in parts]
    if any(s["drafts"]["drafted"] for s in sets):
        rows.append(("drafts (accepted)", [_accepted(**s["drafts"]) for s in sets]))
    rows += [
        ("device busy", [f"{_mean(s, 'busy'):.0%}" if "engines" in s else "-" for s in sets]),
        ("most KV in use", [_most_kv(s) for s in sets]),
        ("preemptions", [str(s.get("preemptions", "-")) for s in sets]),
    ]
    for name in sorted({name for each in sets for name in each.get("classes", ())}):
        rows.append((f"first token in time, {name}", [_in_time(each, name) for each in sets]))
    if "slo" in sets[-1]:
        good = [f"{s['goodput_per_s']:.2f}" if "slo" in s else "-" for s in sets]
        rows.append((f"good/s ({sets[-1]['slo']})", good))
    return rows


def _part(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _accepted(drafted: int, accepted: int) -> str:
    return f"{drafted:,} ({accepted / drafted:.0%})" if drafted else "0"


def _most_kv(figures: Mapping[str, Any]) -> str:
    return f"{max(each['most_kv_used'] for each in figures['engines']):.0%}" if "engines" in figures else "-"


def _of_stores(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Where cached tokens came from, and what became of records."""
    names = list(dict.fromkeys(name for each in sets for name in each.get("stores", ())))
    rows = []
    for name in ("pool", *names) if names else ():
        prompts = [s.get("prompt_tokens", {"all": 0}) for s in sets]
        shares = [f"{of.get(name, 0) / of['all']:.1%}" if of["all"] else "-" for of in prompts]
        rows.append((f"cached in {name}", shares))
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
