from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.contracts.counters import Metric
from engine.contracts.events import (
    DroppedEvent,
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    TokensEvent,
)
from engine.contracts.provider import BuildContext
from engine.counters import fleet as gauges
from engine.counters.declared import SECONDS
from engine.counters.engine import EngineCounters
from engine.counters.metrics import Histogram, Metrics
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, Fed, one_of_each, request_event, step_event
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.exposition import page
from engine_plugins.exporter.prometheus import PrometheusExporter


def context(name: str = "m") -> BuildContext:
    base = build_context()
    return replace(base, model=replace(base.model, name=name))


def plain(compat: str = "none", name: str = "m") -> PrometheusExporter:
    return PrometheusExporter(PrometheusConfig(compat=compat), context(name))


def make(compat: str = "none", name: str = "m", drafts: int = 4) -> Fed:
    return Fed(plain(compat, name), drafts)


def families(exporter: Fed) -> dict:
    found = list(text_string_to_metric_families(exporter.render()))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "a family occurs twice"
    return {family.name: family for family in found}


def value(exporter: Fed, sample: str, **labels: str) -> float:
    """The one sample of that name whose labels contain the given ones."""
    matches = [
        s.value
        for family in families(exporter).values()
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    ]
    assert len(matches) == 1, f"{sample} {labels}: {matches}"
    return matches[0]


class TestConformance(ExporterConformance):
    def make(self) -> PrometheusExporter:
        return plain()


class TestConformanceWithVllmNames(ExporterConformance):
    def make(self) -> PrometheusExporter:
        return plain("vllm")


def test_every_family_has_a_type_a_help_text_and_the_labels_model_and_engine():
    exporter = make()
    exporter.export(one_of_each())
    for family in families(exporter).values():
        assert family.name.startswith("engine_")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert all({"model": "m", "engine": "default"}.items() <= each.labels.items() for each in family.samples)


def listing(page: str) -> str:
    """A line for each metric: type, name, each label with its values, and what the metric means."""
    lines = []
    for family in text_string_to_metric_families(page):
        labels: dict[str, dict[str, None]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, {})[value] = None
        shown = " ".join(f"{label}={'|'.join(values)}" for label, values in labels.items())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"{family.type} {name} {{{shown}}} {family.documentation}\n")
    return "".join(lines)


def test_a_scrape_keeps_its_metrics_labels_and_meanings():
    """Dashboards and alerts of others read them: a change of the listing belongs in the changelog."""
    exporter = plain("vllm", "bundled")
    fed, fleet = Fed(exporter, 4), gauges.readings(dict.fromkeys(gauges.METRICS, 16.0), "default")
    counted = exporter._readings
    exporter.watch(lambda: [*counted(), *fleet])
    fed.export([*one_of_each(), step_event(kv_groups_used=(("full", 0.5),))])
    assert listing(exporter.render()) == Path(__file__).with_name("metrics.txt").read_text("utf-8")


def test_histogram_buckets_are_cumulative_and_end_at_the_count():
    exporter = make()
    exporter.export([FirstTokenEvent(1.0, "r", ms) for ms in (0.05, 0.1, 7.0, 90_000.0)])
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for sample in families(exporter)["engine_ttft_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    counts = dict(buckets)
    assert [bound for bound, _ in buckets] == [*SECONDS, float("inf")]
    assert counts[0.0001] == 2  # a bound belongs to its bucket
    assert counts[0.006] == 2 and counts[0.007] == 3
    assert counts[60.0] == 3 and counts[float("inf")] == 4
    assert value(exporter, "engine_ttft_seconds_count") == 4
    assert value(exporter, "engine_ttft_seconds_sum") == pytest.approx(90.00715)


def test_itl_buckets_tell_half_a_millisecond_apart():
    for ms in (0.5, 1.0, 2.0, 3.5, 4.5):
        exporter = make()
        exporter.export([TokensEvent(1.0, "r", 1, ms), TokensEvent(1.0, "r", 1, ms + 0.5)])
        samples = families(exporter)["engine_itl_seconds"].samples
        counts = {sample.value for sample in samples if sample.name.endswith("_bucket")}
        assert 1 in counts, f"{ms} and {ms + 0.5} ms share a bucket"


def test_itl_counts_tokens_not_outputs():
    exporter = make()
    exporter.export([TokensEvent(1.0, "r", 4, 0.5), TokensEvent(1.0, "r", 1, 8.0)])
    assert value(exporter, "engine_itl_seconds_count") == 5
    assert value(exporter, "engine_itl_seconds_sum") == pytest.approx(0.010)


def test_each_kv_group_has_its_own_usage():
    exporter = make()
    exporter.export([step_event(kv_used=0.9, kv_groups_used=(("full", 0.9), ("window_64", 0.3)))])
    exporter.export([step_event(kv_used=0.5, kv_groups_used=(("full", 0.2), ("window_64", 0.5)))])
    assert value(exporter, "engine_kv_used_ratio") == 0.5
    assert value(exporter, "engine_kv_group_used_ratio", group="full") == 0.2
    assert value(exporter, "engine_kv_group_used_ratio", group="window_64") == 0.5


def test_gauges_hold_the_latest_step_and_counters_the_sum():
    exporter = make()
    exporter.export([step_event(running=5, waiting=9, kv_used=0.9, drafted=8, accepted=6, preemptions=1)])
    exporter.export([step_event(running=2, waiting=0, kv_used=0.1, drafted=4, accepted=1)])
    assert value(exporter, "engine_requests_running") == 2
    assert value(exporter, "engine_requests_waiting") == 0
    assert value(exporter, "engine_kv_used_ratio") == 0.1
    assert value(exporter, "engine_drafted_tokens_total") == 12
    assert value(exporter, "engine_accepted_tokens_total") == 7
    assert value(exporter, "engine_preemptions_total") == 1
    assert value(exporter, "engine_step_tokens_total", kind="prefill") == 20
    assert value(exporter, "engine_step_requests_count") == 2


def test_drafts_are_counted_by_their_position():
    exporter = make()
    exporter.export([step_event(drafts_tried=(3, 2, 1), drafts_accepted=(2, 1, 0)), step_event()])
    exporter.export([step_event(drafts_tried=(1, 1), drafts_accepted=(1, 0))])
    tried, accepted = (
        [value(exporter, f"engine_draft_tokens_{name}_per_position_total", position=str(at)) for at in (1, 2, 3, 4)]
        for name in ("tried", "accepted")
    )
    assert (tried, accepted) == ([4, 3, 1, 0], [3, 1, 0, 0])


def test_an_engine_without_drafts_has_no_positions():
    exporter = make(drafts=0)
    exporter.export(one_of_each())
    assert families(exporter)["engine_draft_tokens_tried_per_position"].samples == []


def test_prefix_cache_and_dropped_events_are_summed():
    exporter = make()
    exporter.export([PrefixCacheEvent(1.0, 100, 80), PrefixCacheEvent(1.0, 20, 0), DroppedEvent(1.0, 7)])
    assert value(exporter, "engine_prefix_cache_queries_total") == 120
    assert value(exporter, "engine_prefix_cache_hits_total") == 80
    assert value(exporter, "engine_dropped_events_total") == 7


def test_aborted_requests_are_counted_and_stay_out_of_end_to_end_latency():
    exporter = make()
    exporter.export([request_event(finish_reason=reason) for reason in ("stop", "stop", "abort", "error")])
    assert value(exporter, "engine_requests_total", finish_reason="stop") == 2
    assert value(exporter, "engine_requests_total", finish_reason="length") == 0
    assert value(exporter, "engine_aborts_total") == 1
    assert value(exporter, "engine_e2e_seconds_count") == 2
    assert value(exporter, "engine_queue_seconds_count") == 4
    assert value(exporter, "engine_generation_tokens_total") == 20


def test_a_single_token_has_no_tpot():
    exporter = make()
    exporter.export([request_event(output_tokens=1, tpot_ms=0.0)])
    assert value(exporter, "engine_tpot_seconds_count") == 0


def test_an_unexpected_status_is_counted_as_other():
    exporter = make()
    exporter.export([RejectedEvent(1.0, 429, "full"), RejectedEvent(1.0, 418, "teapot")])
    assert value(exporter, "engine_rejected_total", status="429") == 1
    assert value(exporter, "engine_rejected_total", status="other") == 1


def test_vllm_names_come_on_top_with_their_labels_and_buckets():
    exporter = make("vllm", name="served")
    exporter.export(one_of_each())
    exporter.export([step_event(running=2, waiting=3, kv_used=0.5)])
    names = {"model_name": "served", "engine": "0"}
    assert value(exporter, "vllm:num_requests_running", **names) == 2
    assert value(exporter, "vllm:num_requests_waiting", **names) == 3
    assert value(exporter, "vllm:kv_cache_usage_perc", **names) == 0.5
    assert value(exporter, "vllm:request_success_total", finished_reason="stop", **names) == 1
    assert value(exporter, "vllm:time_to_first_token_seconds_bucket", le="0.02", **names) == 1
    assert value(exporter, "vllm:iteration_tokens_total_count") == 2
    assert value(exporter, "engine_requests_running") == 2
    assert not any(name.startswith("vllm") for name in families(make()))


def test_the_kv_cache_is_told_in_vllms_labels_of_engines_that_have_started():
    exporter = plain("vllm")
    known = [*gauges.readings({gauges.KV_TOKENS: None}, "a"), *gauges.readings({gauges.KV_TOKENS: 4096}, "b")]
    exporter.watch(lambda: known)
    (line,) = [line for line in exporter.render().splitlines() if line.startswith("vllm:cache_config_info{")]
    labels = 'model_name="m",engine="1",block_size="16",num_gpu_blocks="256"'
    assert line == f"vllm:cache_config_info{{{labels}}} 1.0"


def several(*engines: str) -> PrometheusExporter:
    """An exporter that watches engines of these ids, which have had no events yet."""
    exporter = plain("vllm")
    counters = [EngineCounters(4, engine) for engine in engines]
    exporter.watch(lambda: [reading for each in counters for reading in each.readings()])
    return exporter


def of_engine(engine: str, *events: Event) -> list[Event]:
    return [msgspec.structs.replace(event, engine=engine) for event in events]


def test_vllm_names_have_a_set_of_series_for_each_engine_numbered_in_the_servers_order():
    exporter = several("replica-0", "replica-1")
    exporter.export(of_engine("replica-1", FirstTokenEvent(1.0, "r", 5.0), step_event(running=7)))
    exporter.export([*of_engine("replica-0", step_event(running=2)), DroppedEvent(1.0, 3)])
    found = list(text_string_to_metric_families(exporter.render()))
    assert len({family.name for family in found}) == len(found), "a family occurs twice"
    samples = [each for family in found if family.name.startswith("vllm:") for each in family.samples]
    assert {each.labels["engine"] for each in samples} == {"0", "1"}
    assert len(samples) == 2 * sum(each.labels["engine"] == "0" for each in samples)
    by_engine = {
        name: {each.labels["engine"]: each.value for each in samples if each.name == f"vllm:{name}"}
        for name in ("num_requests_running", "time_to_first_token_seconds_count")
    }
    assert by_engine == {
        "num_requests_running": {"0": 2, "1": 7},
        "time_to_first_token_seconds_count": {"0": 0, "1": 1},
    }
    helped = [line.split()[2] for line in exporter.render().splitlines() if line.startswith("# HELP")]
    assert len(helped) == len(set(helped))


def test_series_of_one_name_are_together_and_each_occurs_once():
    lines = several("a", "b").render().splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    inside = None
    for line in lines:
        if line.startswith("# TYPE"):
            inside = line.split()[2]
        elif not line.startswith("#"):
            assert inside is not None and line.startswith(inside), line


def test_a_model_name_cannot_break_the_page():
    name = 'a"b\\c\nd'
    exporter = make("vllm", name)
    assert value(exporter, "engine_aborts_total", model=name) == 0


def test_large_counters_stay_exact():
    metrics = Metrics()
    metrics.scalar(Metric("counter", "c_total", "1", "C.")).add(2**52 + 1)
    (family,) = text_string_to_metric_families(page(metrics.readings(), {}))
    assert family.samples[0].value == 2**52 + 1


def test_a_weighted_observation_equals_that_many_single_ones():
    once, many = (Histogram(Metric("histogram", "h", "s", "H.", bounds=(1.0, 2.0))) for _ in range(2))
    once.observe(1.5, weight=3)
    for _ in range(3):
        many.observe(1.5)
    assert once.reading() == many.reading()


def test_an_unknown_compat_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="compat=sglang"):
        PrometheusConfig(compat="sglang")
