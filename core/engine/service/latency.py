"""Rolling latency percentiles, served at ``/engine/latency``: exact over a bounded window of recent
events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.contracts.events import Event, FirstTokenEvent, RequestEvent, TokensEvent
from engine.contracts.percentiles import Sample, describe

METRICS = ("ttft_ms", "predicted_ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms")


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

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokensEvent():
                    self._samples["itl_ms"].append((event.at_s, event.itl_ms, event.num_tokens))
                case FirstTokenEvent():
                    self._samples["ttft_ms"].append((event.at_s, event.ttft_ms, 1))
                    if event.predicted_ms:
                        self._samples["predicted_ttft_ms"].append((event.at_s, event.predicted_ms, 1))
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
        return {"window_s": self._window_s, **{name: describe(self.recent(name)) for name in METRICS}}

    def recent(self, name: str) -> list[Sample]:
        """The samples of a metric that are not too old."""
        oldest = self._clock() - self._window_s
        return [(value, weight) for at_s, value, weight in self._samples[name] if at_s >= oldest]
