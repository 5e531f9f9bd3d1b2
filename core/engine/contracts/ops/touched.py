"""How many experts a step reads, on average."""

from __future__ import annotations

from functools import lru_cache
from math import comb, floor


def touched_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """How many experts so many tokens are routed to, if each goes to any ``top_k`` alike: real routers repeat
    themselves, and touch fewer."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def busiest_share(num_experts: int, shares: int, touched: float) -> float:
    """Of ``touched`` experts, any alike, how many the share with most of them has, on average. Shares are as equal as
    can be, as :func:`engine.models.placement.place` makes them."""
    below = floor(touched)
    rest = touched - below
    most = _busiest(num_experts, shares, below)
    return most if rest == 0.0 else (1.0 - rest) * most + rest * _busiest(num_experts, shares, below + 1)


@lru_cache(maxsize=1024)
def _busiest(num_experts: int, shares: int, touched: int) -> float:
    """The mean of the maximum: of all ways to choose ``touched`` experts, how many leave no share with more than
    ``most`` is a coefficient of a product of polynomials."""
    each, larger = divmod(num_experts, shares)
    sizes = [each + (i < larger) for i in range(shares)]
    total, mean = comb(num_experts, touched), 0.0
    for most in range(min(touched, max(sizes))):
        ways = [1]
        for size in sizes:
            ways = _product(ways, [comb(size, count) for count in range(min(size, most) + 1)], touched)
        mean += 1.0 - (ways[touched] / total if touched < len(ways) else 0.0)
    return mean


def _product(a: list[int], b: list[int], degree: int) -> list[int]:
    """Of two polynomials, up to ``degree``."""
    found = [0] * min(len(a) + len(b) - 1, degree + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(found) - i]):
            found[i + j] += x * y
    return found
