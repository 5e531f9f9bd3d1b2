"""Exporter ``prometheus``: the engine's counters at ``/metrics``. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from engine.contracts.counters import Reading
from engine.contracts.events import DEFAULT_ENGINE, Event
from engine.contracts.provider import BuildContext
from engine.counters.fleet import KV_TOKENS
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.exposition import info, page
from engine_plugins.exporter.vllm_names import CACHE_CONFIG, VllmMetrics, cache_config


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
        readings = self._readings()
        own = page(readings, {"model": self._model}, names_engine=True)
        if not self._has_vllm_names:
            return own
        if not self._vllm:
            self._of(DEFAULT_ENGINE)
        numbered = enumerate(self._vllm.values())
        found = [replace(each, engine=str(number)) for number, counts in numbered for each in counts.readings()]
        return own + self._cache_config(readings) + page(found, {"model_name": self._model}, names_engine=True)

    def _cache_config(self, readings: Sequence[Reading]) -> str:
        """Of the engines whose KV pool is known: of those that have started."""
        numbers = {engine: str(number) for number, engine in enumerate(self._vllm)}
        return info(
            CACHE_CONFIG,
            [
                {
                    "model_name": self._model,
                    "engine": numbers[each.engine],
                    **cache_config(self._block_size, each.values[""]),
                }
                for each in readings
                if each.name == KV_TOKENS.name and each.values
            ],
        )

    def _of(self, engine: str) -> VllmMetrics:
        if (found := self._vllm.get(engine)) is None:
            found = self._vllm[engine] = VllmMetrics()
        return found

    def close(self) -> None:
        """Nothing is buffered."""
