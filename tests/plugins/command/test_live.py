"""What commands read of a running engine."""

import math

import pytest

from engine_plugins.command.live import LiveError, Sample, quantile, samples


def test_a_page_of_metrics_is_read_back():
    page = '# HELP a x\n# TYPE a counter\na{model="m \\"1\\"",le="+Inf"} 3 1700000000\nb 0.5\n'
    assert list(samples(page)) == [Sample("a", {"model": 'm "1"', "le": "+Inf"}, 3.0), Sample("b", {}, 0.5)]


def test_a_page_that_is_none_is_refused():
    with pytest.raises(LiveError, match="expected Prometheus' text format"):
        list(samples("<html>"))


def test_quantiles_of_a_histogram_are_those_of_prometheus():
    buckets = {0.1: 10.0, 0.2: 30.0, math.inf: 40.0}
    assert quantile(0.25, buckets) == pytest.approx(0.1)
    assert quantile(0.5, buckets) == pytest.approx(0.15)
    assert quantile(0.99, buckets) == 0.2, "beyond the last bound nothing is known"
    assert math.isnan(quantile(0.5, {0.1: 0.0, math.inf: 0.0}))
