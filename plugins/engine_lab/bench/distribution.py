"""Length distributions as written on the command line: ``128``, ``uniform:64,256`` or
``lognormal:512,0.6``."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """Draws whole numbers of at least 1.

    ``fixed`` (a), ``uniform`` (a to b, both included) or ``lognormal`` with *mean* a and shape b: b is the
    standard deviation of the logarithm, so 0 is fixed and 1 is heavy-tailed; at most 3.
    """

    kind: str
    a: float
    b: float = 0.0

    def sample(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "lognormal":
            # exp(N(mu, b)) has mean exp(mu + b^2 / 2).
            mu = math.log(self.a) - self.b * self.b / 2
            return max(1, round(rng.lognormvariate(mu, self.b)))
        return int(self.a)

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g},{self.b:g}"


ONE = Distribution("fixed", 1.0)


def parse_distribution(text: str) -> Distribution:
    """Raises ``ValueError`` that names the text and the accepted forms."""
    kind, colon, numbers = text.partition(":")
    try:
        if colon:
            a, b = (float(part) for part in numbers.split(","))
            found = Distribution(kind, a, b)
        else:
            found = Distribution("fixed", float(int(text)))
    except ValueError:
        found = Distribution("unknown", 0.0)
    if not is_valid(found):
        raise ValueError(
            f"{text!r}: expected a whole number of at least 1, uniform:LOW,HIGH or lognormal:MEAN,SIGMA; SIGMA is "
            "the standard deviation of the logarithm, from 0 (all equal) to 3"
        )
    return found


def is_valid(found: Distribution) -> bool:
    a, b = found.a, found.b
    if found.kind == "uniform":
        return 1 <= a <= b and a.is_integer() and b.is_integer()
    if found.kind == "lognormal":
        return 1 <= a < math.inf and 0 <= b <= 3
    return found.kind == "fixed" and a >= 1
