"""``/metrics`` keeps its names, types, labels and meanings: dashboards and alerts of others read them.

``metrics.txt`` is what an engine with its bundled model, 4 drafts at most and ``exporter.prometheus.compat=vllm``
answered. A change there is a change for everybody who reads the page: it belongs in the changelog.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.testing.context import build_context
from engine.testing.exporter import Fed, one_of_each, step_event
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter

KEPT = Path(__file__).with_name("metrics.txt")


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


def test_a_scrape_has_the_same_metrics_labels_and_meanings() -> None:
    context = build_context(block_size=16)
    context = replace(context, model=replace(context.model, name="bundled"))
    exporter = Fed(PrometheusExporter(PrometheusConfig(compat="vllm"), context), max_draft_tokens=4)
    exporter.export([*one_of_each(), step_event(kv_groups_used=(("full", 0.5),))])
    assert listing(exporter.render()) == KEPT.read_text("utf-8")
