"""A gateway's counters, kept from its events, and their declarations. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import Event, OwnRequestEvent, ProxiedEvent, RejectedEvent
from engine.contracts.shares import share_interval
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
LOOKS = Metric(
    "counter", "engine_gateway_looks_total", "requests", "Looks at how a model's answer begins, by result.", "result"
)
SHADOWS = Metric(
    "counter", "engine_gateway_shadows_total", "requests", "Answers compared with the largest model's.", "result"
)
AGREEMENT = Metric(
    "gauge", "engine_gateway_agreement", "1", "Share of compared answers that agree, and its 95 % interval.", "bound"
)
LOOKED = ("confident", "unsure", "no_logprobs", "failed")
COMPARED = ("agrees", "differs", "failed", "dropped")
OF_TARGETS = (REQUESTS, RETRIES, FIRST_BYTE, ERROR, COST, ANSWERED, SEQUENCES, READY)
OF_NAMES = (LOOKS, SHADOWS, AGREEMENT)
METRICS = (*OF_TARGETS, *OF_NAMES, REJECTED)


class GatewayCounters:
    """Counts of each target, and of each name that stands for several models; the label ``engine`` is the id or the
    name, and ``default`` for the gateway itself. Fed and read by one thread, that of the event bus."""

    def __init__(self, targets: Sequence[str], names: Mapping[str, Sequence[str]] | None = None) -> None:
        """``names``: each with the models that it stands for."""
        self._of = {name: _Counts(names or {}) for name in targets}
        self.names = {name: NameCounts() for name in names or {}}
        self._own = Metrics()
        self._rejected = self._own.scalar(REJECTED, STATUSES)

    @property
    def shed(self) -> float:
        """Requests that the gateway itself refused with 429."""
        return self._rejected.values["429"]

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ProxiedEvent | OwnRequestEvent) and (counts := self._of.get(event.server)) is not None:
                counts.add(event)
            elif isinstance(event, RejectedEvent):
                self._rejected.add(1, _status(event.status))
            if isinstance(event, OwnRequestEvent) and (of_name := self.names.get(event.name)) is not None:
                of_name.add(event)

    def readings(self, now: Mapping[str, tuple[bool, int]]) -> list[Reading]:
        """``now``: of each target, whether it takes requests and the sequences it has."""
        of_targets = {name: counts.readings(*now[name]) for name, counts in self._of.items()}
        of_names = {name: counts.readings() for name, counts in self.names.items()}
        return [
            replace(reading, engine=name)
            for found in (of_targets, of_names)
            for name, readings in found.items()
            for reading in readings
        ] + self._own.readings()


class NameCounts:
    """Of one name: what came of the gateway's own requests."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Counter[str]]] = {"look": {}, "shadow": {}}
        """By purpose and model: how often each result."""

    def add(self, event: OwnRequestEvent) -> None:
        self._of[event.purpose].setdefault(event.model, Counter())[event.result] += 1

    def by_model(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By purpose and model, as plain data."""
        looks = {model: _all(LOOKED, counts) for model, counts in self._of["look"].items()}
        shadows = {
            model: _all(COMPARED, counts) | {"agreement": agreement(counts)}
            for model, counts in self._of["shadow"].items()
        }
        return {"look": looks, "shadow": shadows}

    def readings(self) -> list[Reading]:
        """Of all models together; none of what was never asked for."""
        metrics = Metrics()
        for purpose, metric, results in (("look", LOOKS, LOOKED), ("shadow", SHADOWS, COMPARED)):
            if self._of[purpose]:
                metrics.scalar(metric).values = _all(results, self._total(purpose))
        if found := agreement(self._total("shadow")):
            metrics.scalar(AGREEMENT).values = found
        return metrics.readings()

    def _total(self, purpose: str) -> Counter[str]:
        return sum(self._of[purpose].values(), Counter())


def _all(results: Sequence[str], counts: Mapping[str, int]) -> dict[str, float]:
    return {result: counts.get(result, 0) for result in results}


def agreement(counts: Mapping[str, int]) -> dict[str, float] | None:
    """The share of compared answers that agree, with its interval; ``None``: none was compared."""
    agrees = counts.get("agrees", 0)
    if not (total := agrees + counts.get("differs", 0)):
        return None
    low, high = share_interval(agrees, total)
    return {"low": low, "share": agrees / total, "high": high}


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

    def add(self, event: ProxiedEvent | OwnRequestEvent) -> None:
        self._cost.add(event.cost)
        if isinstance(event, ProxiedEvent):
            self._add(event)

    def _add(self, event: ProxiedEvent) -> None:
        self._requests.add(1, _status(event.status))
        if event.status == 200 and (pair := _answered(event.name, event.model)) in self._answered.values:
            self._answered.add(1, pair)
        self._retries.add(event.attempts > 1)
        if event.first_ms:
            self._first.observe(event.first_ms / 1e3)
        if event.first_ms and event.expected_ms and event.attempts == 1:
            self._error.observe(abs(event.first_ms - event.expected_ms) / 1e3)

    def readings(self, is_ready: bool, sequences: int) -> list[Reading]:
        self._ready.set(is_ready)
        self._sequences.set(sequences)
        return self._metrics.readings()


def _answered(name: str, model: str) -> str:
    return f"{name} -> {model}"


def _status(status: int) -> str:
    return str(status) if str(status) in STATUSES else "other"
