"""A dashboard as data, and as the JSON that Grafana imports (classic model, schema 39: Grafana 10.4 and later)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.counters.declared import REQUESTS_RUNNING

SCHEMA = 39
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'job=~"$job",model=~"$model",instance=~"$instance",engine=~"$engine"'
"""Labels of the engines that the viewer has chosen."""


@dataclass(frozen=True, slots=True)
class Query:
    promql: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str
    """Grafana's id of it."""
    kind: str = "timeseries"
    """Or ``stat``, ``heatmap``."""
    says: str = ""
    """What it shows, where the title does not."""
    steps: tuple[tuple[float, str], ...] = ()
    """From which value on it has which colour; green below."""

    @property
    def size(self) -> tuple[int, int]:
        return (4, 4) if self.kind == "stat" else (8, 8)

    def plain(self, number: int, x: int, y: int) -> dict[str, Any]:
        width, height = self.size
        is_heatmap = self.kind == "heatmap"
        targets = [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query.promql,
                "legendFormat": query.legend or "__auto",
                "format": "heatmap" if is_heatmap else "time_series",
                "range": True,
            }
            for at, query in enumerate(self.queries)
        ]
        colours = [{"value": None, "color": "green"}, *({"value": low, "color": name} for low, name in self.steps)]
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": colours}}
        if self.kind == "timeseries":
            defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.says,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": width, "h": height},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"calculate": False, "yAxis": {"unit": self.unit}} if is_heatmap else {},
        }


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[Row, ...]
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Further variables: what the viewer may choose, the default first."""

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def plain(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["engine"],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "links": [{"type": "dashboards", "title": "engine", "tags": ["engine"], "keepTime": True}],
            "templating": {"list": [*_variables(), *(_choice(*each) for each in self.choices.items())]},
            "annotations": {"list": []},
            "panels": list(_placed(self.rows)),
        }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """From left to right, row by row."""
    number, y = 1, 0
    for row in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        number, x, y, below = number + 1, 0, y + 1, y + 1
        for panel in row.panels:
            width, height = panel.size
            if x + width > COLUMNS:
                x, y = 0, below
            yield panel.plain(number, x, y)
            number, x, below = number + 1, x + width, max(below, y + height)
        y = below


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    chosen = ""
    for name in ("job", "model", "instance", "engine"):
        query = f"label_values({REQUESTS_RUNNING.name}{{{chosen}}}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        chosen += f'{"," * bool(chosen)}{name}=~"${name}"'


def _choice(name: str, values: tuple[str, ...]) -> dict[str, Any]:
    options = [{"text": value, "value": value, "selected": value == values[0]} for value in values]
    return {
        "name": name,
        "label": name.replace("_", " ").upper(),
        "type": "custom",
        "query": ",".join(values),
        "options": options,
        "current": options[0],
    }
