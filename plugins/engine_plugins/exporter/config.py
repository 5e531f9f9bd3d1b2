"""Configuration of the built-in exporters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine.contracts.config import SlotConfig, at_least, one_of
from engine_lab.alerts.slo import SLO_CLASSES


@dataclass(frozen=True)
class PrometheusConfig(SlotConfig):
    """Metrics in the Prometheus text format at ``/metrics``."""

    compat: str = "none"
    """``vllm``: also emit the metric names vLLM uses."""

    def __post_init__(self) -> None:
        one_of("exporter.prometheus.compat", self.compat, ("none", "vllm"))


@dataclass(frozen=True)
class JsonlConfig(SlotConfig):
    """Every event as one line of JSON."""

    path: str = "engine-events.jsonl"


@dataclass(frozen=True)
class TraceConfig(SlotConfig):
    """Requests without texts, to be simulated."""

    path: str = "engine-trace.jsonl"
    """Appended to: each run of the server begins a part."""


@dataclass(frozen=True)
class ConsoleConfig(SlotConfig):
    """A summary line on the console."""

    every_s: float = 10.0
    """Seconds between lines."""

    def __post_init__(self) -> None:
        at_least("exporter.console.every_s", self.every_s, 0.1)


@dataclass(frozen=True)
class OtlpConfig(SlotConfig):
    """Spans of requests to an OpenTelemetry collector (OTLP over HTTP, in JSON)."""

    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    service_name: str = "engine"
    """``service.name`` of the resource."""
    headers_file: str | None = None
    """A file of ``Name: value`` lines, for keys."""
    timeout_s: float = 5.0
    """For each attempt."""

    def __post_init__(self) -> None:
        check_url("exporter.otlp.endpoint", self.endpoint)
        at_least("exporter.otlp.timeout_s", self.timeout_s, 0.1)


@dataclass(frozen=True)
class WebhookConfig(SlotConfig):
    """Alerts, as Alertmanager posts them."""

    url: str = "http://127.0.0.1:9099/alerts"
    every_s: float = 15.0
    """Between two evaluations of the rules."""
    repeat_s: float = 3600.0
    """After so long it tells again what still fires."""
    slo: str = "chat"
    """Class of service whose limits the burn rates are of: ``chat``, ``code`` or ``batch``."""
    objective: float = 0.99
    """Share of requests that should keep them."""
    rag: bool = False
    """Also the rules for retrieval-augmented generation, whose prompts share most of their text."""
    headers_file: str | None = None
    """A file of ``Name: value`` lines, for keys."""
    timeout_s: float = 5.0
    """For each attempt."""

    def __post_init__(self) -> None:
        check_url("exporter.webhook.url", self.url)
        at_least("exporter.webhook.every_s", self.every_s, 1)
        at_least("exporter.webhook.repeat_s", self.repeat_s, 60)
        one_of("exporter.webhook.slo", self.slo, tuple(SLO_CLASSES))
        if not 0.0 < self.objective < 1.0:
            raise ValueError(f"exporter.webhook.objective={self.objective}: expected a share between 0 and 1")
        at_least("exporter.webhook.timeout_s", self.timeout_s, 0.1)


def check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"{key}={url}: expected an http or https URL")


def read_headers(key: str, path: str | None) -> dict[str, str]:
    """Of a file; none without one. Raises ``ValueError``."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}={path}: expected a file of ASCII text ({error})") from error
    found = {}
    for number, line in enumerate(filter(str.strip, lines), start=1):
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not name.strip().isprintable() or " " in name.strip():
            raise ValueError(f"{key}={path}: header {number} is not 'Name: value'")
        found[name.strip()] = value.strip()
    return found
