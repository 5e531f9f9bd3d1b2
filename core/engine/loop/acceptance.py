"""How often drafts stand, from what became of chains of them."""

from __future__ import annotations

from typing import NamedTuple

_PRIOR_TRIALS = 2.0


class Chains(NamedTuple):
    """What became of drafts."""

    chains: int
    drafted: int
    accepted: int


class AcceptanceRate:
    """Rate at which a draft stands, given that those before it stood; with exponential forgetting."""

    def __init__(self) -> None:
        self._trials = 0.0
        self._hits = 0.0

    def observe(self, chains: int, drafted: int, accepted: int, forget: float, times: int) -> None:
        """``accepted`` of ``drafted`` tokens stood, in ``chains`` chains together. Before, everything is forgotten to
        ``forget``, so many ``times``."""
        rate = rate_of_mean(accepted / chains, drafted / chains)
        falls = chains * (1.0 - rate ** (drafted / chains))
        keep = forget**times
        self._hits = keep * self._hits + accepted
        self._trials = keep * self._trials + accepted + falls

    def rate(self, prior: float) -> float:
        """The estimate in [0, 1], pulled towards ``prior`` while there is little evidence."""
        return (self._hits + _PRIOR_TRIALS * prior) / (self._trials + _PRIOR_TRIALS)


def rate_of_mean(mean: float, width: float) -> float:
    """The rate ``a`` for which chains of ``width`` drafts have ``mean = a + ... + a**width`` accepted ones."""
    low, high = 0.0, 1.0
    if mean >= width:
        return 1.0
    for _ in range(20):
        rate = 0.5 * (low + high)
        if rate * (1.0 - rate**width) / (1.0 - rate) < mean:
            low = rate
        else:
            high = rate
    return low
