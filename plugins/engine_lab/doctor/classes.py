"""Who gets what: requests by class, and whether a change makes any class wait longer.

A class is one of the server's (``slo.classes``); without them, requests with short and with long prompts are told apart
where the longest is at least four times as long as a short one. A mean over both would hide who pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

APART = 4.0
WORSE = 1.1
"""A class's P95 after a change / before, from which on the change harms it."""
CHAT_ITL_MS = 50.0
"""ITL of class ``chat``: below it harms nobody, however much less it was."""
ALL, SHORT, LONG = "all", "short", "long"
LABELS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E"}


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended while the engine was watched: enough to send one like it, and what it got."""

    at_s: float
    """When it arrived, since the first that is kept."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    stream: bool
    ttft_ms: float
    itl_ms: float
    """Mean of its tokens."""
    e2e_ms: float
    of_class: str = ""
    """Of the server's; empty: it has none."""
    temperature: float = 0.0


P95s = dict[str, dict[str, float]]
"""By class and by key of :data:`LABELS`; ITL of those with two tokens."""


def long_from(prompts: Sequence[float]) -> float:
    """Tokens from which on a prompt is a long one; infinite where all are about as long."""
    ordered = sorted(prompts)
    low, high = max(1.0, ordered[len(ordered) // 10]), ordered[-1]
    return math.sqrt(low * high) if high >= APART * low else math.inf


def by_class(requests: Sequence[Recorded], limit: float | None = None) -> dict[str, list[Recorded]]:
    """``limit``: tokens from which on a prompt is long; ``None``: as these requests are. Empty without requests."""
    if not requests:
        return {}
    limit = limit or long_from([each.prompt_tokens for each in requests])
    found: dict[str, list[Recorded]] = {}
    for each in requests:
        length = ALL if math.isinf(limit) else LONG if each.prompt_tokens >= limit else SHORT
        found.setdefault(each.of_class or length, []).append(each)
    return dict(sorted(found.items(), reverse=True))


def p95s(requests: Sequence[Recorded], limit: float | None = None) -> P95s:
    """By nearest rank: of fewer than 20 it is the highest. ``limit``: see :func:`by_class`."""
    found: P95s = {}
    for name, some in by_class(requests, limit).items():
        for key in LABELS:
            values = sorted(getattr(each, key) for each in some if key != "itl_ms" or each.output_tokens > 1)
            if values:
                found.setdefault(name, {})[key] = values[math.ceil(0.95 * len(values)) - 1]
    return found


def harmed(before: P95s, after: P95s) -> Iterator[str]:
    """A line for each class and figure that a change made worse."""
    for name, figures in before.items():
        for key, was in figures.items():
            now = after.get(name, {}).get(key, was)
            if now > WORSE * was and (key != "itl_ms" or now > CHAT_ITL_MS):
                yield f"{name}: {LABELS[key]} P95 {was:.4g} -> {now:.4g} ms (x {now / was:.2f})"


def in_words(found: Mapping[str, Mapping[str, float]]) -> str:
    """In a line."""
    return "; ".join(
        f"{name}: {', '.join(f'{LABELS[key]} {value:.4g}' for key, value in figures.items())}"
        for name, figures in found.items()
    )
