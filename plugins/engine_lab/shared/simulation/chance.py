"""Chances that do not depend on what else is simulated."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def chance(seed: int, request: int, token: int) -> float:
    """From 0 to 1, the same for a request's token whatever else is in the step (SplitMix64)."""
    z = ((seed << 32) + request) * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9 & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z >> 11) / (1 << 53)
