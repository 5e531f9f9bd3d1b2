"""Where events go."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.exporter.config import (
    ConsoleConfig,
    JsonlConfig,
    OtlpConfig,
    PrometheusConfig,
    TraceConfig,
    WebhookConfig,
)


@hookimpl
def engine_exporter() -> list[Provider]:
    return [
        Provider(
            "prometheus",
            "engine_plugins.exporter.prometheus:PrometheusExporter",
            config=PrometheusConfig,
            doc="Metrics at /metrics.",
        ),
        Provider(
            "jsonl",
            "engine_plugins.exporter.jsonl:JsonlExporter",
            config=JsonlConfig,
            doc="Events as lines of JSON in a file.",
        ),
        Provider(
            "trace",
            "engine_plugins.exporter.trace:TraceExporter",
            config=TraceConfig,
            doc="Requests as a trace for engine simulate: lengths and salted hashes, no texts.",
        ),
        Provider(
            "console",
            "engine_plugins.exporter.console:ConsoleExporter",
            config=ConsoleConfig,
            doc="A summary line every few seconds.",
        ),
        Provider(
            "otlp",
            "engine_plugins.exporter.otlp:OtlpExporter",
            config=OtlpConfig,
            doc="Spans of requests and their phases to an OpenTelemetry collector.",
        ),
        Provider(
            "webhook",
            "engine_plugins.exporter.webhook:WebhookExporter",
            config=WebhookConfig,
            doc="Alerts of the engine's own rules to a URL, as Alertmanager posts them.",
        ),
    ]
