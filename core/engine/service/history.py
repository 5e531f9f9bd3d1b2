"""What an engine served over the last hour, in fixed room: served at ``/engine/history``."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from time import monotonic
from typing import Any

from engine.contracts.events import (
    Event,
    FirstTokenEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.contracts.percentiles import Sample, describe

PERIOD_S = 5.0
MOST_PERIODS = 720
MOST_SAMPLES = 4096
"""Of one latency in one period: of more, the first ones count."""
ALL = ""
"""The class of service that stands for all of them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one period. Times are those of events within it: of first tokens, of tokens, of ends. ``None``: of too few."""

    requests: int = 0
    """That ended."""
    errors: int = 0
    """Requests that ended in an error, or were refused with status 429 or 5xx."""
    output_tokens: int = 0
    prompt_tokens: int | None = None
    """Computed, by steps. Steps are of no class."""
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_max_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_max_ms: float | None = None
    running: int | None = None
    """Most in a step, as ``waiting`` and ``kv_used``."""
    waiting: int | None = None
    kv_used: float | None = None
    cpus_used: float | None = None
    """By the server and its engines, on average, as ``cpus_others``. The machine is of no class."""
    cpus_others: float | None = None
    """By other processes, and by other virtual machines."""
    machine_busy: bool | None = None
    """Threads waited for cores that others had."""


COLUMNS = tuple(each.name for each in fields(Figures))


@dataclass(slots=True)
class _Period:
    """The period that is not over yet."""

    number: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("requests", "errors", "output_tokens"), 0))
    steps: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float | None] = field(default_factory=dict)
    ttft: list[Sample] = field(default_factory=list)
    itl: list[Sample] = field(default_factory=list)

    def step(self, event: StepEvent) -> None:
        steps = self.steps
        steps["prompt_tokens"] = steps.get("prompt_tokens", 0) + event.num_prefill_tokens
        for name in ("running", "waiting", "kv_used"):
            steps[name] = max(steps.get(name, 0), getattr(event, name))

    def figures(self) -> Figures:
        found: dict[str, Any] = {**self.counts, **self.steps, **self.machine}
        for name, samples in (("ttft", self.ttft), ("itl", self.itl)):
            told = describe(samples)
            largest = max((value for value, _ in samples), default=None)
            found |= {f"{name}_p50_ms": told["p50"], f"{name}_p95_ms": told["p95"], f"{name}_max_ms": largest}
        return Figures(**found)


class History:
    """Figures of each period of :data:`PERIOD_S` seconds of the events' clock, of the last :data:`MOST_PERIODS`; for
    all requests, and for those of each class of service."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """``clock``: the events', in seconds."""
        self._clock = clock
        self._open: dict[str, _Period] = {}
        self._over: defaultdict[str, deque[tuple[int, Figures]]] = defaultdict(lambda: deque(maxlen=MOST_PERIODS))

    def add(self, events: Sequence[Event]) -> None:
        """Events of one engine, in order."""
        for event in events:
            match event:
                case StepEvent():
                    # Of the engine's own machine, whose clock may be ahead of this one's.
                    self._period(ALL, min(event.at_s, self._clock())).step(event)
                case FirstTokenEvent():
                    for period in self._periods(event):
                        period.counts["output_tokens"] += 1
                        _keep(period.ttft, (event.ttft_ms, 1))
                case TokensEvent():
                    for period in self._periods(event):
                        period.counts["output_tokens"] += event.num_tokens
                        _keep(period.itl, (event.itl_ms, event.num_tokens))
                case RequestEvent():
                    for period in self._periods(event):
                        period.counts["requests"] += 1
                        period.counts["errors"] += event.finish_reason == "error"
                case RejectedEvent() if event.status == 429 or event.status >= 500:
                    for period in self._periods(event):
                        period.counts["errors"] += 1
                case _:
                    pass

    def add_machine(self, cpus_used: float | None, cpus_others: float | None, is_busy: bool) -> None:
        """Of the seconds before now."""
        period = self._period(ALL, self._clock())
        period.machine = {"cpus_used": cpus_used, "cpus_others": cpus_others, "machine_busy": is_busy}

    def since(self, number: int = 0, slo_class: str = ALL) -> dict[str, Any]:
        """``{"period_s", "now", "first", "ago_s", "columns": {name: [...]}}``: the periods from ``number`` on, or those
        that are kept, without a gap: ``first`` is the number of the first one, which began ``ago_s`` seconds ago.
        ``now``: the number of the period that is not over yet, which is the last one."""
        now_s = self._clock()
        now = int(now_s // PERIOD_S)
        kept = dict(self._over.get(slo_class, ()))
        if (period := self._open.get(slo_class)) is not None:
            kept[period.number] = period.figures()
        first = max(min(number, now), now - MOST_PERIODS + 1, min(kept, default=now))
        rows = [asdict(kept.get(each, Figures())) for each in range(first, now + 1)]
        columns = {name: [row[name] for row in rows] for name in COLUMNS}
        return {"period_s": PERIOD_S, "now": now, "first": first, "ago_s": now_s - first * PERIOD_S, "columns": columns}

    def _periods(self, event: FirstTokenEvent | TokensEvent | RequestEvent | RejectedEvent) -> list[_Period]:
        names = (ALL, event.slo_class) if event.slo_class else (ALL,)
        return [self._period(name, event.at_s) for name in names]

    def _period(self, slo_class: str, at_s: float) -> _Period:
        """The open one, for an event that comes a little late, too."""
        number, period = int(at_s // PERIOD_S), self._open.get(slo_class)
        if period is not None and number <= period.number:
            return period
        if period is not None:
            self._over[slo_class].append((period.number, period.figures()))
        period = self._open[slo_class] = _Period(number)
        return period


def _keep(samples: list[Sample], sample: Sample) -> None:
    if len(samples) < MOST_SAMPLES:
        samples.append(sample)
