"""A gateway's counters, kept from its events, and their declarations. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import Event, ProxiedEvent
from engine.counters.declared import SECONDS
from engine.counters.metrics import Metrics

STATUSES = ("200", "400", "404", "429", "499", "500", "502", "503", "504", "other")
REQUESTS = Metric("counter", "engine_gateway_requests_total", "requests", "Requests ended, by status.", "status")
RETRIES = Metric("counter", "engine_gateway_retries_total", "requests", "Requests that came here from another target.")
FIRST_BYTE = Metric(
    "histogram",
    "engine_gateway_first_byte_seconds",
    "s",
    "Arrival at the gateway to the first byte of the target's answer.",
    bounds=SECONDS,
)
ERROR = Metric(
    "histogram",
    "engine_gateway_first_byte_error_seconds",
    "s",
    "How far the first byte of a stream came from when it was expected.",
    bounds=SECONDS,
)
COST = Metric(
    "counter", "engine_gateway_cost_total", "1", "Cost of a provider's answers, in the currency of its prices."
)
SEQUENCES = Metric("gauge", "engine_gateway_sequences", "sequences", "Sent to the target and not ended.")
READY = Metric("gauge", "engine_gateway_target_ready", "1", "Whether the target takes requests.")
METRICS = (REQUESTS, RETRIES, FIRST_BYTE, ERROR, COST, SEQUENCES, READY)


class GatewayCounters:
    """Counts of each target, whose id is the label ``engine``. Fed and read by one thread, that of the event bus."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._of = {name: _Counts() for name in targets}

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ProxiedEvent) and (counts := self._of.get(event.server)) is not None:
                counts.add(event)

    def readings(self, now: Mapping[str, tuple[bool, int]]) -> list[Reading]:
        """``now``: of each target, whether it takes requests and the sequences it has."""
        return [
            replace(reading, engine=name)
            for name, counts in self._of.items()
            for reading in counts.readings(*now[name])
        ]


class _Counts:
    """Of one target."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._requests = self._metrics.scalar(REQUESTS, STATUSES)
        self._retries = self._metrics.scalar(RETRIES)
        self._first = self._metrics.histogram(FIRST_BYTE)
        self._error = self._metrics.histogram(ERROR)
        self._cost = self._metrics.scalar(COST)
        self._sequences = self._metrics.scalar(SEQUENCES)
        self._ready = self._metrics.scalar(READY)

    def add(self, event: ProxiedEvent) -> None:
        status = str(event.status)
        self._requests.add(1, status if status in STATUSES else "other")
        self._retries.add(event.attempts > 1)
        if event.first_ms:
            self._first.observe(event.first_ms / 1e3)
        if event.first_ms and event.expected_ms and event.attempts == 1:
            self._error.observe(abs(event.first_ms - event.expected_ms) / 1e3)
        self._cost.add(event.cost)

    def readings(self, is_ready: bool, sequences: int) -> list[Reading]:
        self._ready.set(is_ready)
        self._sequences.set(sequences)
        return self._metrics.readings()
