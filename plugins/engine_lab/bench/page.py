"""The result as one page: plots, the figures as tables, and all data as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_lab.bench import rates, versus
from engine_lab.bench.report import METRICS, facts, ms, share, show
from engine_lab.bench.result import Result
from engine_lab.bench.slo import parse_slo
from engine_lab.shared.chart import Series, chart
from engine_lab.shared.document import document
from engine_lab.shared.markup import Markup, table, tag

RANKS = ("mean", "p50", "p95", "p99", "max")


def page(result: Result) -> str:
    """Of one load, several ones, or two servers."""
    schema = result["schema"]
    made = _rates if schema == rates.SCHEMA else _versus if schema == versus.SCHEMA else _run
    title, sections = made(result)
    return document(title, sections, result)


def _head(title: str, load: str, result: Result, lines: Sequence[str]) -> list[Markup]:
    state = [] if result["valid"] else [tag("p", "INVALID: the client was too slow", class_="worse")]
    return [
        tag("h1", title),
        tag("p", load, class_="lead"),
        *state,
        tag("ul", *(tag("li", line) for line in lines), class_="notes"),
    ]


def _run(result: Result) -> tuple[str, list[Markup]]:
    config = result["config"]
    title = f"{config['model']} at {config['url']}"
    limits = dict(parse_slo(result["goodput"]["slo"]).limits_ms) if _has_one_slo(result) else {}
    lines = [f"{name}: {text}" if name else text for name, text in facts(result)]
    parts = _head(title, config["load"], result, [*lines, *result["invalid_reasons"]])
    charts = [_over_time(result, key, label, limits.get(key)) for key, label in (("ttft", "TTFT"), ("e2e", "E2E"))]
    charts += [_by_share(result, key, label) for key, label in (("ttft", "TTFT"), ("tpot", "TPOT"))]
    parts += [tag("div", *charts, class_="charts"), tag("h2", "Latencies (ms)")]
    rows = [
        [label, *(ms(result["metrics"][key][rank]) for rank in RANKS), f"{result['metrics'][key]['count']:,}"]
        for key, label in METRICS
    ]
    parts.append(table(["", *RANKS, "samples"], rows))
    if result["classes"]:
        parts += [tag("h2", "Classes of requests"), _parts_table("class", list(result["classes"].items()))]
    if result["slices"]:
        parts += [
            tag("h2", "Slices of time"),
            _parts_table("from", [(f"{one['from_s']:g} s", one) for one in result["slices"]]),
        ]
    return title, parts


def _has_one_slo(result: Result) -> bool:
    return result["goodput"] is not None and "=" in result["goodput"]["slo"]


def _over_time(result: Result, key: str, label: str, limit_ms: float | None) -> Markup:
    """A dot a request, by when it was due; a colour a class."""
    begin = min((record["scheduled_s"] for record in result["records"]), default=0.0)
    series = []
    for name in sorted({record["service_class"] for record in result["records"]}):
        points = [
            (record["scheduled_s"] - begin, record[f"{key}_ms"])
            for record in result["records"]
            if record["service_class"] == name and _is_ok(record) and record[f"{key}_ms"] is not None
        ]
        series.append(Series(name, points, is_line=False))
    mark = None if limit_ms is None else (limit_ms, f"{limit_ms:g} ms")
    return chart(f"{label} of each request (ms)", "due (s)", series, y_mark=mark)


def _by_share(result: Result, key: str, label: str) -> Markup:
    values = sorted(r[f"{key}_ms"] for r in result["records"] if _is_ok(r) and r[f"{key}_ms"] is not None)
    points = [(100 * (i + 1) / len(values), value) for i, value in enumerate(values)]
    return chart(f"{label} that a share of requests keeps (ms)", "share of requests (%)", [Series(label, points)])


def _is_ok(record: dict[str, Any]) -> bool:
    return not record["error"] and not record["left"]


def _parts_table(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Markup:
    body = [
        [
            name or "-",
            f"{one['ok']:,} of {one['requests']:,}",
            *(ms(one[key][rank]) for key in ("ttft_ms", "itl_ms", "e2e_ms") for rank in ("p50", "p95")),
            share(one["goodput"]),
        ]
        for name, one in rows
    ]
    return table([title, "ok", "TTFT P50", "P95", "ITL P50", "P95", "E2E P50", "P95", "within limits"], body)


def _rates(result: Result) -> tuple[str, list[Markup]]:
    config, rows = result["config"], result["rows"]
    title = f"{config['model']} at {config['url']}"
    knee = next((one for one in result["knees"] if one["row"] is not None), None)
    mark = None if knee is None else (knee["ended_per_s"], f"knee, {knee['kind']}")
    charts = [
        chart(f"{label} (ms)", "requests per second; of rates: as they come", _curves(rows, key), x_mark=mark)
        for key, label in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E"))
    ]
    head = ["load", "ended/s", "tokens/s", "TTFT P50", "P95", "ITL P50", "P95", "E2E P50", "P95", "within limits"]
    body = [
        [
            rates.name_of(each) + ("" if each["valid"] else ", INVALID"),
            show(each["ended_per_s"]),
            show(each["output_tokens_per_s"], 1),
            *(ms(each[f"{key}_{rank}_ms"]) for key in ("ttft", "itl", "e2e") for rank in ("p50", "p95")),
            share(each["goodput"]),
        ]
        for each in rows
    ]
    parts = _head(title, config["load"], result, rates.notes(result))
    return title, [*parts, tag("div", *charts, class_="charts"), tag("h2", "Loads"), table(head, body)]


def _curves(rows: Sequence[dict[str, Any]], key: str) -> list[Series]:
    found = []
    for is_open, name in ((False, "at once"), (True, "rates")):
        for rank in ("p50", "p95"):
            points = [
                (each["rate"] or each["ended_per_s"], each[f"{key}_{rank}_ms"])
                for each in rows
                if (each["rate"] is not None) == is_open and each[f"{key}_{rank}_ms"] is not None
            ]
            if points:
                found.append(Series(f"{name} {rank.upper()}", points))
    return found


def _versus(result: Result) -> tuple[str, list[Markup]]:
    a, b = (result["config"][side] for side in versus.SIDES)
    shown = {found["label"] for found in result["figures"]}
    charts = [_bursts(result, figure) for figure in versus.FIGURES if figure.label in shown]
    load = f"a: {a['model']} at {a['url']}; b: {b['model']} at {b['url']}"
    head = ["", "a", "b", "b / a", "95 % interval", ""]
    parts = _head("Two servers in turns", load, result, versus.notes(result))
    return "Two servers in turns", [
        *parts,
        table(head, list(map(versus.cells, result["figures"]))),
        tag("div", *charts, class_="charts"),
    ]


def _bursts(result: Result, figure: versus.Figure) -> Markup:
    """A point a burst, in the order of pairs."""
    series = []
    for at, side in enumerate(versus.SIDES):
        values = [(i + 1.0, figure.of(pair[at])) for i, pair in enumerate(result["bursts"])]
        series.append(Series(side, [(i, value) for i, value in values if value is not None]))
    return chart(f"{figure.label} of each burst", "pair", series)
