"""Patterns of arrivals as written on the command line: ``poisson``, ``constant``, ``gamma:0.5`` or ``burst:8``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the gaps between arrivals are spread; their mean is what the rate says.

    ``poisson``: exponential. ``constant``: all equal. ``gamma``: of this shape; 1 is Poisson, less comes in clumps,
    more is more even. ``burst``: so many at once, and then none for as long.
    """

    kind: str
    value: float = 1.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Endless, with a mean of 1."""
        while True:
            if self.kind == "burst":
                yield from (0.0,) * (int(self.value) - 1)
                yield self.value
            elif self.kind == "gamma":
                yield rng.gammavariate(self.value, 1.0 / self.value)
            else:
                yield 1.0 if self.kind == "constant" else rng.expovariate(1.0)

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}" if self.kind in ("gamma", "burst") else self.kind


POISSON, CONSTANT = Pattern("poisson"), Pattern("constant")


def parse_pattern(text: str) -> Pattern:
    """Raises ``ValueError`` that names the text and the accepted forms."""
    kind, colon, amount = text.partition(":")
    try:
        found = Pattern(kind, float(amount)) if colon else Pattern(kind)
    except ValueError:
        found = Pattern("unknown")
    is_plain = not colon and found in (POISSON, CONSTANT)
    is_gamma = colon and found.kind == "gamma" and 0 < found.value < math.inf
    is_burst = colon and found.kind == "burst" and found.value >= 1 and found.value.is_integer()
    if not (is_plain or is_gamma or is_burst):
        raise ValueError(f"{text!r}: expected poisson, constant, gamma:SHAPE with a shape above 0, or burst:N")
    return found
