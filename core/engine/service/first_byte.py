"""When the first byte of a target's stream comes: learned from those that have come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

KEEPS = 0.98
"""What each new measurement leaves of the weight of those before: the last fifty decide."""
FEWEST = 8
"""With fewer measurements nothing is predicted."""
STALE_S = 10.0
"""A target that measured nothing for so long may have become quicker."""


@dataclass(slots=True)
class FirstByteModel:
    """Of one target: milliseconds = base + slope * tokens, by least squares in which old measurements fade. Tokens are
    those of all prompts that wait there when a request is sent, its own included, without cached ones."""

    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _last_s: float = 0.0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, tokens: int, ms: float) -> None:
        """One that comes after a pause in less than half of what was expected makes it begin anew."""
        expected_ms = self.ms(tokens) if self.is_stale else None
        if expected_ms is not None and ms < 0.5 * expected_ms:
            self.count, self._weight, self._x, self._y, self._xx, self._xy = 0, 0.0, 0.0, 0.0, 0.0, 0.0
        self.count, self._last_s = self.count + 1, self.clock()
        for name, value in (
            ("_weight", 1.0),
            ("_x", tokens),
            ("_y", ms),
            ("_xx", tokens * tokens),
            ("_xy", tokens * ms),
        ):
            setattr(self, name, getattr(self, name) * KEEPS + value)

    @property
    def is_stale(self) -> bool:
        return self.clock() - self._last_s > STALE_S

    def ms(self, tokens: int) -> float | None:
        """What is expected with so many; ``None``: too few were measured."""
        if self.count < FEWEST:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = max(0.0, (self._xy / self._weight - x * y) / variance) if variance > 1e-6 * (1.0 + x * x) else 0.0
        return max(0.0, y + slope * (tokens - x))
