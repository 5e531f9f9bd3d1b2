"""When first tokens of classes of requests are expected, and how wrong that was."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.contracts.percentiles import percentiles
from engine.service.first_byte import FirstByteModel
from engine.service.promises import DEFAULT_CLASS, Promise

FEWEST_ERRORS = 20
"""With fewer of them nothing is said of their percentiles."""
MOST_ERRORS = 200
"""Of each class: the newest."""


@dataclass(slots=True, eq=False)
class Expected:
    """The first token of one request at one engine. Times are the clock's, in seconds."""

    promise: Promise | None
    """Of its class; ``None``: there are none."""
    tokens: int
    """Of its prompt, without those that are expected to be cached."""
    ahead: int
    """Such tokens of requests that wait there and are due before it."""
    sent_s: float
    due_s: float
    """Infinite where there are no classes."""
    ms: float | None
    """From :attr:`sent_s` on; ``None``: too little was measured."""


@dataclass(slots=True)
class _Measured:
    """Of one class."""

    model: FirstByteModel
    """Of those in time: what makes way because it is late says nothing of those that do not."""
    errors_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    """How much later the first token was expected than it came; below 0: sooner. Of all."""
    errors_in_time_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    """Of those in time, which the line is of. Those that were late came later than expected, since they made way: the
    more of them, the less a percentile of all errors says of how much sooner one may come."""


class Forecast:
    """Of one engine: a line over the tokens that are computed before a first token, for each class.

    Those that are late already make way, as :mod:`engine.loop.due_times` has it. Use on one thread.
    """

    def __init__(self, late_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._late_s = late_s
        self._clock = clock
        self._waiting: set[Expected] = set()
        self._classes: dict[str, _Measured] = defaultdict(lambda: _Measured(FirstByteModel(clock)))

    def expect(self, promise: Promise | None, tokens: int) -> Expected:
        """Of a request that would be sent now."""
        now_s = self._clock()
        due_s = math.inf if promise is None else promise.due_s(now_s)
        ahead = sum([each.tokens for each in self._waiting if self._turn_s(each, now_s) <= due_s])
        ms = self._classes[_name(promise)].model.ms(ahead + tokens)
        return Expected(promise, tokens, ahead, now_s, due_s, ms)

    def is_too_late(self, expected: Expected, elapsed_ms: float = 0.0) -> bool:
        """Whether the first token is expected too late, even if it comes as much sooner as half of those in time have.
        Never where nobody waits before it, so an engine that has become faster is found out. ``elapsed_ms``: since the
        request came."""
        promise, measured = expected.promise, self._classes[_name(expected.promise)]
        if promise is None or not expected.ahead or expected.ms is None:
            return False
        if len(measured.errors_in_time_ms) < FEWEST_ERRORS:
            return False
        (sooner_ms,) = percentiles([(max(0.0, error), 1) for error in measured.errors_in_time_ms], (50,))
        return elapsed_ms + expected.ms - sooner_ms > promise.slo.ttft_ms

    def sent(self, expected: Expected) -> None:
        """It waits there. Always :meth:`end` it."""
        self._waiting.add(expected)

    def first_token(self, expected: Expected, at_s: float | None = None) -> None:
        """It has come: now, unless ``at_s`` says when."""
        if expected not in self._waiting:
            return
        self._waiting.remove(expected)
        at_s = self._clock() if at_s is None else at_s
        ms, measured = (at_s - expected.sent_s) * 1e3, self._classes[_name(expected.promise)]
        is_in_time = at_s <= expected.due_s
        if is_in_time:
            measured.model.add(expected.ahead + expected.tokens, ms)
        if expected.ms is not None:
            measured.errors_ms.append(expected.ms - ms)
            if is_in_time:
                measured.errors_in_time_ms.append(expected.ms - ms)

    def end(self, expected: Expected) -> None:
        """It waits no longer. Idempotent."""
        self._waiting.discard(expected)

    def summary(self) -> dict[str, Any]:
        """By class: errors either way in ms, ``None`` of too few."""
        return {name: self._summary(measured) for name, measured in self._classes.items()}

    def _summary(self, measured: _Measured) -> dict[str, Any]:
        errors = [(abs(error), 1) for error in measured.errors_ms]
        p50, p90 = percentiles(errors, (50, 90)) if len(errors) >= FEWEST_ERRORS else (None, None)
        return {"predictions": len(errors), "error_p50_ms": p50, "error_p90_ms": p90}

    def _turn_s(self, each: Expected, now_s: float) -> float:
        return each.due_s + self._late_s if each.due_s < now_s else each.due_s


def _name(promise: Promise | None) -> str:
    return DEFAULT_CLASS if promise is None else promise.name
