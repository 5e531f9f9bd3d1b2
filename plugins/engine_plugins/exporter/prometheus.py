"""Exporter ``prometheus``: the engine's counters at ``/metrics``. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contracts.counters import Reading
from engine.contracts.events import Event
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.exposition import page
from engine_plugins.exporter.vllm_names import VllmMetrics


class PrometheusExporter:
    """The plugin: a :class:`~engine.contracts.exporter.ScrapedExporter` of the engine's counters."""

    def __init__(self, config: PrometheusConfig, context: BuildContext) -> None:
        self._model = context.model.name
        self._readings: Callable[[], Sequence[Reading]] = tuple
        self._vllm = VllmMetrics(context.block_size) if config.compat == "vllm" else None

    def watch(self, readings: Callable[[], Sequence[Reading]]) -> None:
        self._readings = readings

    def export(self, events: Sequence[Event]) -> None:
        if self._vllm is not None:
            for event in events:
                self._vllm.on(event)

    def render(self) -> str:
        own = page(self._readings(), {"model": self._model}, names_engine=True)
        if self._vllm is None:
            return own
        return own + page(self._vllm.readings(), {"model_name": self._model, "engine": "0"})

    def close(self) -> None:
        """Nothing is buffered."""
