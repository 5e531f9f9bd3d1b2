"""Time that passes when a simulated device says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the start of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
