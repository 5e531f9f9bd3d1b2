"""What commands read of a running engine."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.counters.engine import EngineCounters
from engine.testing.context import build_context
from engine.testing.exporter import Fed, one_of_each
from engine_lab.shared.live import LiveError, quantile, readings_in, samples_of
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter


def test_samples_of_counters_are_those_of_a_page_for_prometheus():
    counters = EngineCounters(4, classes=("chat",))
    counters.add(one_of_each())
    page = Fed(PrometheusExporter(PrometheusConfig(), build_context()), 4)
    page.export(one_of_each())
    written = [sample for family in text_string_to_metric_families(page.render()) for sample in family.samples]
    common = {("model", build_context().model.name), ("engine", "default")}
    texts = [(each.name, each.labels.items() - common, each.value) for each in written]
    assert [(each.name, each.labels.items(), each.value) for each in samples_of(counters.readings())] == texts


def test_what_are_no_counters_is_refused():
    with pytest.raises(LiveError, match="something else than counters"):
        readings_in({"metrics": [{"name": 1}]})


def test_quantiles_of_a_histogram_are_those_of_prometheus():
    buckets = {0.1: 10.0, 0.2: 30.0, math.inf: 40.0}
    assert quantile(0.25, buckets) == pytest.approx(0.1)
    assert quantile(0.5, buckets) == pytest.approx(0.15)
    assert quantile(0.99, buckets) == 0.2, "beyond the last bound nothing is known"
    assert math.isnan(quantile(0.5, {0.1: 0.0, math.inf: 0.0}))
