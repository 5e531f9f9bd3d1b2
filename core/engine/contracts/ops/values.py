"""Small values that many ops have."""

from __future__ import annotations

from typing import Literal, NamedTuple

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""``gelu``: with the error function; ``gelu_tanh``: its approximation (both arXiv 1606.08415); ``relu2``: the square of
relu (arXiv 2109.08668)."""


Range = tuple[int, int]
"""The first, and the one after the last."""


class Cut(NamedTuple):
    """What one rank has of something that ranks share out: ``start .. stop`` of ``whole``."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start
