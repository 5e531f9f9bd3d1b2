"""The dashboards are what Grafana imports, and ask for nothing that the engine does not export."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tools.check_dashboards import filled

from engine.cli.main import main
from engine.counters.declared import SECONDS
from engine.testing.context import build_context
from engine.testing.exporter import Fed, one_of_each, step_event
from engine_lab.dashboards.boards import DASHBOARDS, TTFT_LIMITS
from engine_lab.dashboards.model import COLUMNS, SCHEMA, SELECTED
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter

QUERIES = [query for board in DASHBOARDS for panel in board.panels() for query in panel.queries]
METRIC = re.compile(r"\b(engine_\w+)\{([^}]*)\}")
each_board = pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)


def exported() -> dict[str, dict[str, set[str]]]:
    """Of every metric, its labels and their values."""
    exporter = Fed(PrometheusExporter(PrometheusConfig(), build_context()))
    exporter.export([*one_of_each(), step_event(kv_groups_used=(("full", 0.5),))])
    found: dict[str, dict[str, set[str]]] = {}
    for sample in (each for family in text_string_to_metric_families(exporter.render()) for each in family.samples):
        for label, value in sample.labels.items():
            found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


def test_every_metric_and_label_of_a_panel_is_exported():
    known, asked = exported(), set()
    for query in QUERIES:
        for metric, labels in METRIC.findall(query.promql):
            asked.add(metric)
            assert labels.startswith(SELECTED) and metric in known, query.promql
            for label, value in re.findall(r'(\w+)="([^"$]+)"', labels.removeprefix(SELECTED)):
                assert value in known[metric][label], query.promql
        assert set(re.findall(r"engine_\w+", query.promql)) <= known.keys()
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b", query.promql), f"{query.legend} of {query.promql}"
    of_histograms = {name.rsplit("_", 1)[0] for name in known if name.endswith("_bucket")}
    plain = {name for name in known if name.rsplit("_", 1)[0] not in of_histograms}
    not_shown = plain - asked | {name for name in of_histograms if not any(name in metric for metric in asked)}
    assert not_shown == {"engine_dropped_events_total"}, "of it the rules of alerts tell"


def test_limits_to_choose_are_bounds_of_buckets_as_they_are_written():
    assert set(TTFT_LIMITS) <= exported()["engine_ttft_seconds_bucket"]["le"]
    assert {float(limit) for limit in TTFT_LIMITS} <= set(SECONDS)


@each_board
def test_the_check_against_prometheus_fills_in_every_variable(board):
    for query in (query for panel in board.panels() for query in panel.queries):
        assert "$" not in filled(query.promql, board), query.promql


@each_board
def test_panels_fill_the_page_without_lying_over_each_other(board):
    places = [panel["gridPos"] for panel in board.plain()["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS for place in places)
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart_x or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


@each_board
def test_a_dashboard_is_bound_to_no_installation(board):
    plain = board.plain()
    assert plain["schemaVersion"] == SCHEMA and "id" not in plain
    panels = [panel for panel in plain["panels"] if panel["type"] != "row"]
    sources = [part["datasource"] for panel in panels for part in (panel, *panel["targets"])]
    assert panels and all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len({panel["id"] for panel in plain["panels"]}) == len(plain["panels"])
    variables = {variable["name"] for variable in plain["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", json.dumps([panel["targets"] for panel in panels]))) <= variables | {"datasource"}


def test_they_are_written_as_files_named_by_their_uid(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main(["dashboards", "--to", str(folder)]) == 0
    files = sorted(folder.iterdir())
    assert capsys.readouterr().out.split() == [str(folder / f"{board.uid}.json") for board in DASHBOARDS]
    assert [file.stem for file in files] == ["engine-kv", "engine-overview", "engine-requests", "engine-speculation"]
    assert all(json.loads(file.read_text())["uid"] == file.stem for file in files)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["dashboards", "--to", str(tmp_path / "file")]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["dashboards"]) == 2
