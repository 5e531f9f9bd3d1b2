"""Exporter ``console``: one compact line on standard error every few seconds of activity."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from engine.contracts.events import (
    DEFAULT_ENGINE,
    DroppedEvent,
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import ConsoleConfig

MAX_SAMPLES = 20_000
"""Latency samples kept per interval, newest first: bounds memory when ``every_s`` is long."""


@dataclass(slots=True)
class Interval:
    """What happened since the last line."""

    start_s: float
    last_step: StepEvent | None = None
    prefill: int = 0
    decode: int = 0
    drafted: int = 0
    accepted: int = 0
    looked_up: int = 0
    hits: int = 0
    rejected: int = 0
    dropped: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    ttft_ms: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    itl_ms: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def add(self, event: Event) -> None:
        match event:
            case StepEvent():
                self.last_step = event
                self.prefill += event.num_prefill_tokens
                self.decode += event.num_decode_tokens
                self.drafted += event.drafted
                self.accepted += event.accepted
            case TokensEvent():
                self.itl_ms.append((event.itl_ms, event.num_tokens))
            case FirstTokenEvent():
                self.ttft_ms.append((event.ttft_ms, 1))
            case RequestEvent():
                self.ended[event.finish_reason] += 1
            case PrefixCacheEvent():
                self.looked_up += event.queries
                self.hits += event.hits
            case RejectedEvent():
                self.rejected += 1
            case DroppedEvent():
                self.dropped += event.num_events

    def line(self, now_s: float, engine: str = DEFAULT_ENGINE) -> str:
        """``engine``: the id of the engine, which is shown unless it is that of the only one."""
        seconds = max(now_s - self.start_s, 1e-9)
        parts = [", ".join(f"{n} {reason}" for reason, n in sorted(self.ended.items())) or "0 ended"]
        if (step := self.last_step) is not None:
            parts.append(f"{step.running} running {step.waiting} waiting kv {step.kv_used:.0%}")
        parts.append(f"prefill {self.prefill / seconds:.0f} decode {self.decode / seconds:.0f} tok/s")
        if self.ttft_ms:
            parts.append(f"ttft p50 {median(self.ttft_ms):.1f} ms")
        if self.itl_ms:
            parts.append(f"itl p50 {median(self.itl_ms):.2f} ms")
        if self.looked_up:
            parts.append(f"cached {self.hits / self.looked_up:.0%}")
        if self.drafted:
            parts.append(f"accepted {self.accepted / self.drafted:.0%}")
        if self.rejected:
            parts.append(f"{self.rejected} rejected")
        if self.dropped:
            parts.append(f"{self.dropped} events dropped")
        return f"engine{'' if engine == DEFAULT_ENGINE else f' {engine}'}: " + " | ".join(parts)


class ConsoleExporter:
    """The plugin. Time is the events' own clock, so an idle engine prints nothing. Of several engines each has a line;
    events of the server are in the first one."""

    def __init__(self, config: ConsoleConfig, context: BuildContext, out: TextIO | None = None) -> None:
        self._every_s = config.every_s
        self._out = sys.stderr if out is None else out
        self._start_s = self._last_s = 0.0
        self._intervals: dict[str, Interval] = {}
        """The interval that runs, by the engine's id; empty: none runs."""

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            if self._intervals and event.at_s - self._start_s >= self._every_s:
                self._print(event.at_s)
            if not self._intervals:
                self._start_s = event.at_s
            engine = getattr(event, "engine", next(iter(self._intervals), DEFAULT_ENGINE))
            if engine not in self._intervals:
                self._intervals[engine] = Interval(self._start_s)
            self._intervals[engine].add(event)
            self._last_s = event.at_s

    def _print(self, now_s: float) -> None:
        engines = sorted(self._intervals, key=lambda engine: (len(engine), engine))
        lines = [self._intervals[engine].line(now_s, engine) for engine in engines]
        print("\n".join(lines), file=self._out, flush=True)
        self._intervals.clear()

    def close(self) -> None:
        if self._intervals:
            self._print(self._last_s)


def median(samples: Iterable[tuple[float, int]]) -> float:
    """Median of ``(value, weight)`` pairs, at least one."""
    ordered = sorted(samples)
    half = sum(weight for _, weight in ordered) / 2
    below = 0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise AssertionError("weights are positive")
