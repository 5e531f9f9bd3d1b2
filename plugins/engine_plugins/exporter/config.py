"""Configuration of the built-in exporters."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least, one_of


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
