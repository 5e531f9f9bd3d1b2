"""A gateway's counters, kept from its events, and their declarations. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import Event, ProxiedEvent, RejectedEvent
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
ANSWERED = Metric(
    "counter",
    "engine_gateway_answered_total",
    "requests",
    "Requests for a name of gateway.models that were answered, by the model that did.",
    "answered",
)
REJECTED = Metric(
    "counter", "engine_gateway_rejected_total", "requests", "Requests that the gateway itself refused.", "status"
)
SEQUENCES = Metric("gauge", "engine_gateway_sequences", "sequences", "Sent to the target and not ended.")
READY = Metric("gauge", "engine_gateway_target_ready", "1", "Whether the target takes requests.")
METRICS = (REQUESTS, RETRIES, FIRST_BYTE, ERROR, COST, ANSWERED, SEQUENCES, READY, REJECTED)


class GatewayCounters:
    """Counts of each target, whose id is the label ``engine``, and of the gateway itself, which is ``default`` there.
    Fed and read by one thread, that of the event bus."""

    def __init__(self, targets: Sequence[str], names: Mapping[str, Sequence[str]] | None = None) -> None:
        """``names``: each with the models that it stands for."""
        self._of = {name: _Counts(names or {}) for name in targets}
        self._own = Metrics()
        self._rejected = self._own.scalar(REJECTED, STATUSES)

    @property
    def shed(self) -> float:
        """Requests that the gateway itself refused with 429."""
        return self._rejected.values["429"]

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ProxiedEvent) and (counts := self._of.get(event.server)) is not None:
                counts.add(event)
            elif isinstance(event, RejectedEvent):
                self._rejected.add(1, _status(event.status))

    def readings(self, now: Mapping[str, tuple[bool, int]]) -> list[Reading]:
        """``now``: of each target, whether it takes requests and the sequences it has."""
        return [
            replace(reading, engine=name)
            for name, counts in self._of.items()
            for reading in counts.readings(*now[name])
        ] + self._own.readings()


class _Counts:
    """Of one target."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._metrics = Metrics()
        self._requests = self._metrics.scalar(REQUESTS, STATUSES)
        self._retries = self._metrics.scalar(RETRIES)
        self._first = self._metrics.histogram(FIRST_BYTE)
        self._error = self._metrics.histogram(ERROR)
        self._cost = self._metrics.scalar(COST)
        pairs = [_answered(name, model) for name, models in names.items() for model in models]
        self._answered = self._metrics.scalar(ANSWERED, pairs)
        self._sequences = self._metrics.scalar(SEQUENCES)
        self._ready = self._metrics.scalar(READY)

    def add(self, event: ProxiedEvent) -> None:
        self._requests.add(1, _status(event.status))
        if event.status == 200 and (pair := _answered(event.name, event.model)) in self._answered.values:
            self._answered.add(1, pair)
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


def _answered(name: str, model: str) -> str:
    return f"{name} -> {model}"


def _status(status: int) -> str:
    return str(status) if str(status) in STATUSES else "other"
