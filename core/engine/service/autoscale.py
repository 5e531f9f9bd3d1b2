"""The rule by which a server has more or fewer engines: a pure function of figures.

One more, where the backlog exceeds ``fleet.autoscale.backlog_s`` or nothing more fits into the engines, for
``up_after_s`` without a break. One fewer, where the others would be at most half full with what there is, for
``down_after_s`` without a break. Between the two nothing changes, and after a change both are counted anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import AutoscaleSettings

ROOM = 0.5
"""An engine goes where the others would use no more than this share without it, of what would start another one."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all engines at a moment."""

    at_s: float
    up: int
    """Engines that are not stopped, whether or not they take requests."""
    sequences: int
    """Sent to engines and not ended."""
    held: int
    """Requests that wait for an engine to start."""
    backlog_s: float | None
    """Seconds of prefill that wait at each engine that takes requests, on average; ``None``: not known."""
    saturation: float
    """Of the same, 0..1: rows or KV blocks in use, whichever is more; 1: more waits."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Since when there were too few engines, or one too many; ``None``: there are not."""

    high_s: float | None = None
    low_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    engines: int
    reason: str


def decide(settings: AutoscaleSettings, seen: Figures, memory: Memory) -> tuple[Decision | None, Memory]:
    """How many engines there should be from now on, if not as many as there are; and what to remember until the next
    figures. Give it an empty :class:`Memory` after a change."""
    assert settings.max is not None
    if seen.up < settings.min:
        return Decision(settings.min, f"fewer than fleet.autoscale.min={settings.min}"), Memory()
    if seen.up == 0:
        if not seen.held:
            return None, Memory()
        waiting = "1 request waits" if seen.held == 1 else f"{seen.held} requests wait"
        return Decision(1, f"{waiting} for an engine"), Memory()
    high, low = _too_few(settings, seen), _too_many(settings, seen)
    memory = Memory(_since(memory.high_s, seen, high), _since(memory.low_s, seen, low))
    if seen.up < settings.max and memory.high_s is not None and seen.at_s - memory.high_s >= settings.up_after_s:
        return Decision(seen.up + 1, f"{high} for {settings.up_after_s:g} s"), Memory()
    if seen.up > settings.min and memory.low_s is not None and seen.at_s - memory.low_s >= settings.down_after_s:
        return Decision(seen.up - 1, f"{low} for {settings.down_after_s:g} s"), Memory()
    return None, memory


def _too_few(settings: AutoscaleSettings, seen: Figures) -> str:
    """Why; empty: there are enough."""
    if seen.backlog_s is not None and seen.backlog_s > settings.backlog_s:
        return f"a backlog of {seen.backlog_s:.1f} s, over fleet.autoscale.backlog_s={settings.backlog_s:g}"
    return "no row or KV block left" if seen.saturation >= 1.0 else ""


def _too_many(settings: AutoscaleSettings, seen: Figures) -> str:
    """Why; empty: all are needed. The last one goes only where nothing is left to do."""
    if not seen.sequences and not seen.held:
        return "idle"
    if seen.up == 1 or seen.held:
        return ""
    more = seen.up / (seen.up - 1)  # that each of the others gets
    if seen.saturation * more <= ROOM and (seen.backlog_s or 0.0) * more <= ROOM * settings.backlog_s:
        return "one engine fewer would be at most half full"
    return ""


def _since(since_s: float | None, seen: Figures, why: str) -> float | None:
    return None if not why else seen.at_s if since_s is None else since_s
