"""What drafting costs beside a step, and how many drafts are accepted: measured for plans and simulations.

The loop itself chooses how far to draft by :mod:`engine.drafting.policy`; nothing here is asked while it runs, so a
step only adds to sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from engine.contracts.step_cost import DraftCost
from engine.loop.least_squares import solved

TERMS = 4
_FORGET = 0.9999
"""Weight a step keeps when the next one comes: a memory of about 10,000 steps."""


@dataclass(frozen=True, slots=True)
class DraftSample:
    """Of one step."""

    ms: float
    """That the drafter took; 0: it had nothing to do."""
    num_tokens: int
    """That a drafter on the device has seen."""
    asked: Sequence[int]
    """Drafts it was asked for, request by request."""
    num_asked: int
    """Requests of which this step was to verify drafts."""
    num_chains: int
    """Those for which there were drafts."""
    tried: Sequence[int]
    """By position: drafts verified whose predecessors were all accepted."""
    accepted: Sequence[int]
    """Those of ``tried`` that were accepted; may be shorter."""


class DraftFit(msgspec.Struct, frozen=True):
    """What a model hands on."""

    sums: tuple[tuple[float, ...], ...]
    """``[TERMS, TERMS + 1]``; see :mod:`engine.loop.least_squares`."""
    tried: tuple[float, ...]
    accepted: tuple[float, ...]
    asked: float
    chains: float
    num_samples: int

    @property
    def numbers(self) -> list[float]:
        """All of them."""
        return [*chain(*self.sums), *self.tried, *self.accepted, self.asked, self.chains, self.num_samples]


def unusable_fit(fit: DraftFit) -> str | None:
    """Why nothing can go on from a fit that may come from anywhere; ``None``: it can."""
    if [len(row) for row in fit.sums] != [TERMS + 1] * TERMS or len(fit.tried) != len(fit.accepted):
        return f"expected sums of {TERMS} terms of drafting"
    return None


class DraftCostModel:
    """Sums with a long memory."""

    def __init__(self, fit: DraftFit | None = None) -> None:
        """``fit``: of an earlier run of the same drafter on the same device."""
        self._sums = [[0.0] * (TERMS + 1) for _ in range(TERMS)] if fit is None else [list(row) for row in fit.sums]
        self._tried, self._accepted = ([], []) if fit is None else (list(fit.tried), list(fit.accepted))
        self._asked, self._chains = (0.0, 0.0) if fit is None else (fit.asked, fit.chains)
        self._num_samples = 0 if fit is None else fit.num_samples

    def observe(self, sample: DraftSample) -> None:
        if sample.num_asked:
            self._asked = _FORGET * self._asked + sample.num_asked
            self._chains = _FORGET * self._chains + sample.num_chains
        if sample.tried:
            self._count(sample)
        if sample.ms <= 0.0:
            return
        drafts = sum(sample.asked)
        terms = (1.0, sample.num_tokens, max(sample.asked, default=0), drafts)
        weight = 1.0 / (1.0 + sample.num_tokens + drafts)  # variance grows with the work; the mean stays right
        for term, row in zip(terms, self._sums, strict=True):
            scale = weight * term
            row[:] = [_FORGET * total + scale * value for total, value in zip(row, (*terms, sample.ms), strict=True)]
        self._num_samples += 1

    def _count(self, sample: DraftSample) -> None:
        more = len(sample.tried) - len(self._tried)
        self._tried += [0.0] * more
        self._accepted += [0.0] * more
        self._tried = [_FORGET * count for count in self._tried]
        self._accepted = [_FORGET * count for count in self._accepted]
        for position, count in enumerate(sample.tried):
            self._tried[position] += count
        for position, count in enumerate(sample.accepted):
            self._accepted[position] += count

    def cost(self) -> DraftCost | None:
        """``None``: nothing was drafted."""
        if not self._num_samples:
            return None
        base, token, draft, row_draft = solved(self._sums, [0.0] * TERMS)
        acceptance = tuple(
            hits / tried for hits, tried in zip(self._accepted, self._tried, strict=True) if tried >= 1.0
        )
        proposes = min(1.0, self._chains / self._asked) if self._asked else 1.0
        return DraftCost(base, token, draft, row_draft, self._num_samples, proposes, acceptance)

    def fit(self) -> DraftFit | None:
        """``None``: nothing was drafted."""
        if not self._num_samples:
            return None
        return DraftFit(
            tuple(map(tuple, self._sums)), tuple(self._tried), tuple(self._accepted),
            self._asked, self._chains, self._num_samples,
        )  # fmt: skip
