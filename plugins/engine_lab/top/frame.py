"""What is shown: computed from the polls of the last minute."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import msgspec

from engine.machine import MachineUse
from engine_lab.shared.live import machine_between
from engine_lab.top.poll import Poll

RATE_S = 5.0
MINUTE_S = 60.0
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms")


class Percentiles(msgspec.Struct, frozen=True):
    """In ms; of ``n`` samples."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None
    """``None`` of too few samples."""


class Group(msgspec.Struct, frozen=True):
    """The blocks of a KV group."""

    group: str
    total: int
    leased: int
    cached: int
    """Held by the prefix cache alone: free for whom needs them."""


class Store(msgspec.Struct, frozen=True):
    """A KV store of the engine."""

    name: str
    records: int
    num_bytes: int
    most_bytes: int
    faults: int
    loaded_tokens: int = 0
    """Of prompts, since it was started."""


class Rates(msgspec.Struct, frozen=True):
    """Per second, over the last :data:`RATE_S`; ``None``: not known yet."""

    output_tokens: float | None = None
    prefill_tokens: float | None = None
    requests: float | None = None


class Minute(msgspec.Struct, frozen=True):
    """Means over the last minute; ``None``: nothing to divide by."""

    step_ms: float | None = None
    """``gap_ms + device_ms + host_ms + in_line_ms``."""
    gap_ms: float | None = None
    """The device had nothing to do before it, and the host neither planned nor committed it."""
    device_ms: float | None = None
    host_ms: float | None = None
    in_line_ms: float | None = None
    """What is left: it was planned, and the step before it, or the drafter, was still on the device."""
    batch: float | None = None
    """Requests in a step."""
    prefix_hit_rate: float | None = None
    acceptance: float | None = None
    mean_accepted_length: float | None = None
    preemptions: int = 0
    machine: MachineUse | None = None


class Frame(msgspec.Struct, frozen=True):
    """One look."""

    running: int
    waiting: int
    rates: Rates
    minute: Minute
    latency: dict[str, Percentiles]
    kv: tuple[Group, ...]
    series: dict[str, tuple[float, ...]]
    """Of the last minute, an entry between two polls: rates per second, and requests running and waiting."""
    slowest: tuple[dict[str, Any], ...]
    """Of the requests that ended last, as ``/engine/requests`` has them, the slowest first."""
    stores: tuple[Store, ...] = ()
    """Of one engine: where else it keeps keys and values."""
    engines: dict[str, Frame] = {}
    """Those of several engines, by id; this one then has what they come to together, and no latency."""
    states: dict[str, str] = {}
    """How each of ``engines`` is."""
    hosts: dict[str, str] = {}
    """Of engines on other machines than the server: which process runs where."""


class History:
    """The polls of the last minute."""

    def __init__(self) -> None:
        self._polls: deque[Poll] = deque()

    def add(self, poll: Poll) -> None:
        """Forgets what is older than a minute, and everything if the counters started again: another server."""
        last = self._polls[-1] if self._polls else poll
        if any(value < last.counters[key] for key, value in poll.counters.items()):
            self._polls.clear()
        self._polls.append(poll)
        while poll.at_s - self._polls[0].at_s > MINUTE_S and len(self._polls) > 2:
            self._polls.popleft()

    def frame(self) -> Frame:
        """Of at least one poll."""
        now = self._polls[-1]
        since = next(poll for poll in self._polls if now.at_s - poll.at_s <= RATE_S or poll is self._polls[-2])
        return Frame(
            running=now.stats.get("running", 0),
            waiting=now.stats.get("waiting", 0),
            rates=rates(since, now),
            minute=minute(self._polls[0], now),
            latency={name: percentiles_of(now.latency[name]) for name in LATENCIES if now.latency},
            kv=tuple(
                Group(group["group"], group["total"], group["leased"], group["cached"])
                for group in now.stats.get("blocks", ())
            ),
            stores=msgspec.convert(now.stats.get("stores", ()), tuple[Store, ...]),
            series=self._series(),
            slowest=tuple(sorted(now.requests, key=lambda request: -request["total_ms"])),
        )

    def _series(self) -> dict[str, tuple[float, ...]]:
        later = list(self._polls)[1:]
        between = [rates(one, two) for one, two in pairwise(self._polls)]
        return {
            **{name: tuple(getattr(rate, name) or 0.0 for rate in between) for name in Rates.__struct_fields__},
            **{name: tuple(poll.stats.get(name, 0) for poll in later) for name in ("running", "waiting")},
        }


def rates(one: Poll, two: Poll) -> Rates:
    seconds = two.at_s - one.at_s
    if seconds <= 0.0:
        return Rates()
    return Rates(**{name: (two.counters[name] - one.counters[name]) / seconds for name in Rates.__struct_fields__})


def minute(one: Poll, two: Poll) -> Minute:
    counted = {name: two.counters[name] - one.counters[name] for name in two.counters}

    def each(name: str, whole: str, scale: float = 1.0) -> float | None:
        return scale * counted[name] / counted[whole] if counted[whole] > 0 else None

    length = each("accepted", "chains")
    return Minute(
        **step_parts(*(each(f"{name}_s", "steps", 1e3) or 0.0 for name in ("step", "device", "host", "gap"))),
        batch=each("rows", "steps"),
        prefix_hit_rate=each("hits", "queries"),
        acceptance=each("accepted", "drafted"),
        mean_accepted_length=None if length is None else 1.0 + length,
        preemptions=int(counted["preemptions"]),
        machine=machine_between(one.stats, two.stats),
    )


def step_parts(step: float, device: float, host: float, gap: float) -> dict[str, float | None]:
    """Means in ms that add up. A gap in which the host plans or commits is the host's: it counts once."""
    if step == 0.0:
        return {}
    left = max(0.0, step - device - host)
    gap = min(gap, left)
    return {"step_ms": step, "device_ms": device, "host_ms": host, "gap_ms": gap, "in_line_ms": left - gap}


def percentiles_of(said: dict[str, Any]) -> Percentiles:
    return Percentiles(said["count"], said["p50"], said["p95"], said["p99"])
