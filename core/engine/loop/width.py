"""How many tokens to draft: the width with the most expected tokens per millisecond, 0 included.

With conditional acceptance rates ``a1, a2, ...`` a width ``k`` yields ``1 + a1 + a1 a2 + ...`` tokens on average (the
chain of Leviathan et al., arXiv:2211.17192) and costs a step of ``batch * (1 + k)`` tokens plus the drafting. All of
it is measured while serving; nothing here influences *which* tokens come out.
"""

from __future__ import annotations

from engine.contracts.scheduler import StepCost

_BUCKETS = (1, 2, 4, 8, 16, 32)
_FORGET = 0.97
"""Weight a trial keeps when the next one at its position comes."""
_PRIOR_RATE = 0.6
_PRIOR_TRIALS = 2.0
_SWITCH_GAIN = 1.05
"""A new width must promise this much more than the present one."""
_FIRST_PROBE = 16
_SOONEST_PROBE = 4
_LATEST_PROBE = 256
"""Steps between probes: sooner after a probe that paid, later after one that did not."""


class AcceptanceRates:
    """Conditional acceptance by draft position, with exponential forgetting.

    Positions with few trials lean on the position before, the first one on ``prior``.
    """

    def __init__(self, max_width: int) -> None:
        self._trials = [0.0] * max_width
        self._hits = [0.0] * max_width

    def observe(self, drafted: int, accepted: int) -> None:
        """``accepted`` of ``drafted`` tokens of one chain stood; positions after the first fall were never tried."""
        for i in range(min(accepted + 1, drafted, len(self._trials))):
            self._trials[i] = _FORGET * self._trials[i] + 1.0
            self._hits[i] = _FORGET * self._hits[i] + (1.0 if i < accepted else 0.0)

    def rates(self, prior: float) -> list[float]:
        rates: list[float] = []
        for trials, hits in zip(self._trials, self._hits):
            prior = (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)
            rates.append(prior)
        return rates


class _Bucket:
    """What is known about one range of batch sizes."""

    def __init__(self, max_width: int) -> None:
        self.acceptance = AcceptanceRates(max_width)
        self.draft_ms = 0.0
        """Per unit of width; follows what drafting cost lately."""
        self.width: int | None = None
        self.calls = 0
        self.probe_every = _FIRST_PROBE
        self.probing = 0
        """Width of a probe whose outcome is awaited; 0: none."""


class WidthController:
    """Chooses draft widths per batch-size bucket (1, 2, 4, 8, 16, 32 and more). Deterministic.

    :meth:`width` and :meth:`observe` are called once per decoding request and step.
    """

    def __init__(self, max_width: int, adaptive: bool = True) -> None:
        self._max_width = max_width
        self._adaptive = adaptive
        self._all = AcceptanceRates(max_width)
        self._buckets = [_Bucket(max_width) for _ in _BUCKETS]

    def width(self, batch_size: int, cost: StepCost, remaining: int) -> int:
        """Draft tokens wanted for one request: 0 .. ``max_width``.

        ``batch_size``: requests decoding together; ``remaining``: tokens the request may still produce. The last
        of these is always the target's own, so at most ``remaining - 1`` are drafted.
        """
        limit = max(0, min(self._max_width, remaining - 1))
        if not self._adaptive or limit == 0:
            return limit
        bucket = self._buckets[_bucket_index(batch_size)]
        chosen = self._best(bucket, batch_size, cost)
        bucket.width = chosen
        bucket.calls += 1
        if bucket.calls >= bucket.probe_every * max(1, batch_size) and chosen < self._max_width:
            # One request looks one token further, so that better times are noticed.
            bucket.calls = 0
            bucket.probing = chosen + 1
            return min(limit, chosen + 1)
        return min(limit, chosen)

    def observe(self, batch_size: int, drafted: int, accepted: int, draft_ms: float) -> None:
        """One request's verified chain: ``accepted`` of ``drafted`` tokens stood.

        ``draft_ms``: how long the proposal took for the whole batch, in milliseconds. Drafting nothing
        (``drafted == 0``) says nothing about acceptance.
        """
        if drafted <= 0:
            return
        bucket = self._buckets[_bucket_index(batch_size)]
        bucket.acceptance.observe(drafted, accepted)
        self._all.observe(drafted, accepted)
        bucket.draft_ms += 0.1 * (draft_ms / drafted - bucket.draft_ms)
        if bucket.probing and drafted >= bucket.probing:
            paid = accepted >= bucket.probing
            bucket.probe_every = _SOONEST_PROBE if paid else min(_LATEST_PROBE, 2 * bucket.probe_every)
            bucket.probing = 0

    def _best(self, bucket: _Bucket, batch_size: int, cost: StepCost) -> int:
        """The width of highest rate, unless the present one is almost as good."""
        rates = bucket.acceptance.rates((self._all.rates(_PRIOR_RATE) or [_PRIOR_RATE])[0])
        speeds: list[float] = []
        expected, chain = 1.0, 1.0
        for width in range(self._max_width + 1):
            if width:
                chain *= rates[width - 1]
                expected += chain
            ms = cost.ms(batch_size * (1 + width)) + bucket.draft_ms * width
            speeds.append(expected / ms if cost.num_samples and ms > 0.0 else expected)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        present = bucket.width
        if present is not None and speeds[best] < _SWITCH_GAIN * speeds[present]:
            return present
        return best


def _bucket_index(batch_size: int) -> int:
    return max(i for i, low in enumerate(_BUCKETS) if low <= max(1, batch_size))
