"""Rolling latency percentiles, served at ``/engine/latency``: exact over a bounded window of recent
events."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.contracts.events import Event, FirstTokenEvent, RequestEvent, TokensEvent
from engine.contracts.percentiles import Sample, describe
from engine.service.promises import DEFAULT_CLASS

METRICS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms")


class RollingLatency:
    """Keeps the newest ``max_samples`` samples of each metric that are at most ``window_s`` seconds old.

    ``clock`` is the events' clock in seconds. ITL samples weigh as many observations as they have tokens.
    TPOT and E2E are those of sequences that completed (``stop`` or ``length``); queue time is that of every
    ended sequence.
    """

    def __init__(
        self, max_samples: int = 20_000, window_s: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window_s = window_s
        self._clock = clock
        self._samples: dict[str, deque[tuple[float, float, int]]] = {
            name: deque(maxlen=max_samples) for name in METRICS
        }
        self._classes: dict[str, dict[str, deque[tuple[float, float, int]]]] = defaultdict(
            lambda: {name: deque(maxlen=max_samples) for name in ("observed", "expected")}
        )

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokensEvent():
                    self._samples["itl_ms"].append((event.at_s, event.itl_ms, event.num_tokens))
                case FirstTokenEvent():
                    self._samples["ttft_ms"].append((event.at_s, event.ttft_ms, 1))
                    of_class = self._classes[event.slo_class or DEFAULT_CLASS]
                    of_class["observed"].append((event.at_s, event.ttft_ms, 1))
                    if event.expected_ms:
                        of_class["expected"].append((event.at_s, event.expected_ms, 1))
                case RequestEvent():
                    self._add_request(event)
                case _:
                    pass  # says nothing about a latency reported here

    def _add_request(self, event: RequestEvent) -> None:
        self._samples["queue_ms"].append((event.at_s, event.queue_ms, 1))
        if event.finish_reason not in ("stop", "length"):
            return
        self._samples["e2e_ms"].append((event.at_s, event.e2e_ms, 1))
        if event.output_tokens > 1:
            self._samples["tpot_ms"].append((event.at_s, event.tpot_ms, 1))

    def summary(self) -> dict[str, Any]:
        """``{"window_s": ..., "ttft_ms": {"count", "mean", "p50", "p90", "p95", "p99"}, ...}``; a metric
        without samples has ``count`` 0 and ``None`` elsewhere."""
        found = {name: describe(self._recent(samples)) for name, samples in self._samples.items()}
        return {"window_s": self._window_s, **found}

    def of_class(self, slo_class: str) -> dict[str, list[Sample]]:
        """TTFT in ms of one class of requests: ``observed``, and as it was ``expected``."""
        return {name: self._recent(samples) for name, samples in self._classes[slo_class].items()}

    def _recent(self, samples: Iterable[tuple[float, float, int]]) -> list[Sample]:
        oldest = self._clock() - self._window_s
        return [(value, weight) for at_s, value, weight in samples if at_s >= oldest]
