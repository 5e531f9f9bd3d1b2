"""Exporter ``prometheus``: the engine's counters at ``/metrics``. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from engine.contracts.counters import Reading
from engine.contracts.events import DEFAULT_ENGINE, Event
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.exposition import page
from engine_plugins.exporter.vllm_names import VllmMetrics


class PrometheusExporter:
    """The plugin: a :class:`~engine.contracts.exporter.ScrapedExporter` of the engine's counters."""

    def __init__(self, config: PrometheusConfig, context: BuildContext) -> None:
        self._model = context.model.name
        self._readings: Callable[[], Sequence[Reading]] = tuple
        self._block_size = context.block_size
        self._has_vllm_names = config.compat == "vllm"
        self._vllm: dict[str, VllmMetrics] = {}
        """By the engine's id, in the order in which vLLM's names number them."""

    def watch(self, readings: Callable[[], Sequence[Reading]]) -> None:
        self._readings = readings
        if self._has_vllm_names:
            for reading in readings():
                self._of(reading.engine)

    def export(self, events: Sequence[Event]) -> None:
        if self._has_vllm_names:
            for event in events:
                if (engine := getattr(event, "engine", None)) is not None:
                    self._of(engine).on(event)

    def render(self) -> str:
        own = page(self._readings(), {"model": self._model}, names_engine=True)
        if not self._has_vllm_names:
            return own
        if not self._vllm:
            self._of(DEFAULT_ENGINE)
        numbered = enumerate(self._vllm.values())
        found = [replace(each, engine=str(number)) for number, counts in numbered for each in counts.readings()]
        return own + page(found, {"model_name": self._model}, names_engine=True)

    def _of(self, engine: str) -> VllmMetrics:
        if (found := self._vllm.get(engine)) is None:
            found = self._vllm[engine] = VllmMetrics(self._block_size)
        return found

    def close(self) -> None:
        """Nothing is buffered."""
