"""How many tokens to draft: the width with the most expected tokens per millisecond, 0 included.

A chain whose tokens stand with rate ``a`` each, given that those before them stood, yields ``1 + a + ... + a**k``
tokens on average (Leviathan et al., arXiv:2211.17192); its step computes ``batch * (1 + k)`` tokens, plus the drafting.
All of it is measured while serving; nothing here influences *which* tokens come out.
"""

from __future__ import annotations

from engine.contracts.scheduler import StepCost

_BUCKETS = (1, 2, 4, 8, 16, 32)
_FORGET = 0.97
"""What a chain's evidence keeps of its weight when the next chain comes."""
_FORGET_PROBING = 0.8
"""The same while drafting is off: probes are rare, so each must count for more."""
_PRIOR_RATE = 0.6
_PRIOR_TRIALS = 2.0
_GAIN_TO_WIDEN, _GAIN_TO_NARROW = 1.05, 1.01
"""A new width must promise this much more than the present one. Useless drafts cost little where memory is the
limit, but they still cost, so narrowing is the easier way."""
_FIRST_PROBE, _SOONEST_PROBE, _LATEST_PROBE = 16, 4, 256
"""Steps between probes: sooner after a probe that paid, later after one that did not."""


class AcceptanceRate:
    """Rate at which a draft stands, given that those before it stood; with exponential forgetting."""

    def __init__(self) -> None:
        self._trials = 0.0
        self._hits = 0.0

    def observe(self, chains: int, drafted: int, accepted: int, forget: float) -> None:
        """``accepted`` of ``drafted`` tokens stood, in ``chains`` chains together."""
        rate = _rate_of_mean(accepted / chains, drafted / chains)
        falls = chains * (1.0 - rate ** (drafted / chains))
        keep = forget**chains
        self._hits = keep * self._hits + accepted
        self._trials = keep * self._trials + accepted + falls

    def rate(self, prior: float) -> float:
        """The estimate in [0, 1], pulled towards ``prior`` while there is little evidence."""
        return (self._hits + _PRIOR_TRIALS * prior) / (self._trials + _PRIOR_TRIALS)


class _Bucket:
    """What is known about one range of batch sizes."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceRate()
        self.draft_ms = 0.0
        """Per unit of width; follows what drafting cost lately."""
        self.width: int | None = None
        self.idle_calls = 0
        """Calls answered with 0 since the last probe."""
        self.probe_every = _FIRST_PROBE


class WidthController:
    """Chooses draft widths per batch-size bucket (1, 2, 4, 8, 16, 32 and more). Deterministic."""

    def __init__(self, max_width: int, adaptive: bool = True) -> None:
        self._max_width = max_width
        self._adaptive = adaptive
        self._overall = AcceptanceRate()
        self._buckets = [_Bucket() for _ in _BUCKETS]

    def width(self, batch_size: int, cost: StepCost, remaining: int) -> int:
        """Draft tokens wanted for one request: 0 .. ``max_width``. Called once per decoding request and step.

        ``batch_size``: requests decoding together; ``remaining``: tokens the request may still produce. The last
        of these is always the target's own, so at most ``remaining - 1`` are drafted.
        """
        limit = max(0, min(self._max_width, remaining - 1))
        if not self._adaptive or limit == 0:
            return limit
        bucket = self._buckets[_bucket_index(batch_size)]
        bucket.width = self._best(bucket, batch_size, cost)
        if bucket.width > 0:
            bucket.idle_calls = 0
            return min(limit, bucket.width)
        bucket.idle_calls += 1
        if bucket.idle_calls < bucket.probe_every * max(1, batch_size):
            return 0
        # One token for one request, so that better times are noticed.
        bucket.idle_calls = 0
        return 1

    def observe(self, batch_size: int, drafted: int, accepted: int, draft_ms: float) -> None:
        """What one step's drafts came to, all its requests together: ``accepted`` of ``drafted`` tokens stood.

        ``draft_ms``: how long drafting took for the whole batch, in milliseconds. A step without drafts says nothing
        about acceptance.
        """
        if drafted <= 0 or self._max_width == 0:
            return
        bucket = self._buckets[_bucket_index(batch_size)]
        usual = bucket.width if self._adaptive and bucket.width else self._max_width
        probe = self._adaptive and bucket.width == 0
        chains = max(-(-drafted // self._max_width), min(batch_size, -(-drafted // (1 if probe else usual))))
        forget = _FORGET_PROBING if probe else _FORGET
        bucket.acceptance.observe(chains, drafted, accepted, forget)
        self._overall.observe(chains, drafted, accepted, forget)
        bucket.draft_ms += 0.1 * (draft_ms * chains / drafted - bucket.draft_ms)
        if probe and accepted == drafted:
            bucket.probe_every = _SOONEST_PROBE
        elif probe:
            bucket.probe_every = min(_LATEST_PROBE, 2 * bucket.probe_every)
        else:
            bucket.probe_every = _FIRST_PROBE

    def _best(self, bucket: _Bucket, batch_size: int, cost: StepCost) -> int:
        """The width of highest rate, unless the present one is almost as good."""
        rate = bucket.acceptance.rate(self._overall.rate(_PRIOR_RATE))
        speeds: list[float] = []
        expected, chain = 0.0, 1.0
        for width in range(self._max_width + 1):
            expected += chain
            chain *= rate
            ms = cost.ms(batch_size * (1 + width)) + bucket.draft_ms * width
            speeds.append(expected / ms if cost.num_samples and ms > 0.0 else expected)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        present = bucket.width
        if present is None or best == present:
            return best
        gain = _GAIN_TO_WIDEN if best > present else _GAIN_TO_NARROW
        return best if speeds[best] >= gain * speeds[present] else present


def _bucket_index(batch_size: int) -> int:
    return max(i for i, low in enumerate(_BUCKETS) if low <= max(1, batch_size))


def _rate_of_mean(mean: float, width: float) -> float:
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
