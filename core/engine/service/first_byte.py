"""When the first byte of a target's stream comes: learned from those that have come."""

from __future__ import annotations

from dataclasses import dataclass

KEEPS = 0.98
"""What each new measurement leaves of the weight of those before: the last fifty decide."""
FEWEST = 8
"""With fewer measurements nothing is predicted."""


@dataclass(slots=True)
class FirstByteModel:
    """Of one target: milliseconds = base + slope * tokens, by least squares in which old measurements fade. Tokens are
    those of all prompts that wait there when a request is sent, its own included, without cached ones."""

    count: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, tokens: int, ms: float) -> None:
        self.count += 1
        for name, value in (
            ("_weight", 1.0),
            ("_x", tokens),
            ("_y", ms),
            ("_xx", tokens * tokens),
            ("_xy", tokens * ms),
        ):
            setattr(self, name, getattr(self, name) * KEEPS + value)

    def ms(self, tokens: int) -> float | None:
        """What is expected with so many; ``None``: too few were measured."""
        if self.count < FEWEST:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = max(0.0, (self._xy / self._weight - x * y) / variance) if variance > 1e-6 * (1.0 + x * x) else 0.0
        return max(0.0, y + slope * (tokens - x))
