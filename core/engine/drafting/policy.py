"""How many tokens to draft: the number with the most expected output tokens per millisecond, 0 included.

For each range of batch sizes two things are measured while serving: how often the draft at each position of a chain is
accepted, given that those before it were, and how long a decode step takes for each number of drafts asked for, drafter
included. Chains of ``k`` drafts bring ``1 + a1 + a1 a2 + ... + a1 ... ak`` tokens (Leviathan et al., arXiv:2211.17192).
Nothing here influences *which* tokens come out.

Now and then a few steps try another number, so that no figure grows old; what was never tried is estimated from what
was. With 0 drafts a drafter on the device computes nothing for decode steps, so it lacks keys of running requests and
the next trial waits for a request that starts.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Batch sizes that begin a range; steps within one cost about the same."""
PRIOR = 0.6
"""Acceptance of the first draft before any was tried, typical of trained heads (EAGLE3 0.7, n-grams 0.4). A later
position that was not tried lately is taken to be as good as the one before it."""
KEEP = 0.98
"""What all counts of acceptances keep when a step drafts: a memory of some 50 steps, within one long answer. What other
texts taught of positions and batch sizes that are not drafted now does not hold for ever."""
GAIN = 1.05
"""What another number must promise to replace the present one: a mean of step times is off by about 3 %."""
RETRY = 256
"""Decode steps between two trials: with TRIAL, at most 2 % of all steps. While drafting is off, this times what a draft
adds to a step, in steps (a quarter to four): up to there trials cost some 2 % of the time at most."""
TRIAL = 4
"""Steps of a trial. The times of the last ``4 * TRIAL`` steps are kept for each number of drafts."""


class Bucket:
    """What is known about one range of batch sizes."""

    def __init__(self, max_width: int) -> None:
        self.tried = [0.0] * max_width
        """Drafts asked for at each position, all before them accepted; a drafter with nothing to say counts, too."""
        self.accepted = [0.0] * max_width
        self._times: list[deque[float]] = [deque(maxlen=4 * TRIAL) for _ in range(max_width + 1)]
        self._typical: dict[int, float] = {}
        """Both in milliseconds, by number of drafts asked for."""
        self.num_draft_tokens = max_width  # the first steps then tell of every position
        self.steps = RETRY - 2 * TRIAL
        """Since the last trial began. The first one comes soon."""
        self.trials = 0
        self.period = RETRY
        """Steps between the last trial and the next."""

    def trial(self, max_width: int) -> int | None:
        """What is being tried, in turns: none, half and twice as many; ``None``: nothing now."""
        if self.steps < self.period:
            return None
        others = dict.fromkeys((0, self.num_draft_tokens // 2, min(2 * self.num_draft_tokens + 1, max_width)))
        others.pop(self.num_draft_tokens, None)
        return list(others)[self.trials % len(others)] if others else None

    def next_period(self) -> int:
        """Steps until the next trial."""
        none, one = self._typical.get(0), self._typical.get(1)
        if self.num_draft_tokens or not none or not one:
            return RETRY
        return int(RETRY * min(4.0, max(0.25, one / none - 1.0)))

    def took(self, num_draft_tokens: int, ms: float) -> None:
        """A step with so many drafts asked for took ``ms`` milliseconds."""
        times = self._times[num_draft_tokens]
        times.append(ms)
        if len(times) >= TRIAL - 1:  # the first step of a trial is none yet: its drafts were asked for before
            # The middle half: a pause of the machine is no property of drafting.
            middle = sorted(times)[len(times) // 4 : -(len(times) // 4) or None]
            self._typical[num_draft_tokens] = sum(middle) / len(middle)

    def age(self) -> None:
        """A step drafted, of whatever batch size."""
        self.tried = [KEEP * count for count in self.tried]
        self.accepted = [KEEP * count for count in self.accepted]

    def count(self) -> None:
        """A step of this batch size was made."""
        self.steps += 1
        if self.steps >= self.period + TRIAL:
            self.steps, self.trials, self.period = 0, self.trials + 1, self.next_period()

    def ms(self, num_draft_tokens: int) -> float | None:
        """What a step takes: measured, on the line between the nearest measured numbers, or beyond the last."""
        known = sorted(self._typical.items())
        if len(known) < 2:
            return None
        above = next((i for i, (k, _) in enumerate(known) if k >= num_draft_tokens), len(known) - 1)
        (k0, ms0), (k1, ms1) = known[max(above, 1) - 1], known[max(above, 1)]
        slope = (ms1 - ms0) / (k1 - k0)
        if not k0 <= num_draft_tokens <= k1:
            slope = max(slope, 0.0)
        return ms0 + slope * (num_draft_tokens - k0)


class DraftPolicy:
    """Chooses the number of drafts per range of batch sizes. Deterministic."""

    def __init__(self, max_width: int, adaptive: bool = True) -> None:
        """``adaptive=False``: always ``max_width``."""
        self.max_width = max_width
        self._adaptive = adaptive and max_width > 0
        self._buckets = [Bucket(max_width) for _ in BUCKETS]

    def num_draft_tokens(self, batch_size: int) -> int:
        """Drafts to ask for of each request of the next decode step, 0 .. ``max_width``. ``batch_size``: requests
        decoding together."""
        if not self._adaptive:
            return self.max_width
        bucket = self._bucket(batch_size)
        trial = bucket.trial(self.max_width)
        return bucket.num_draft_tokens if trial is None else trial

    def is_on(self, batch_size: int) -> bool:
        """Whether drafting pays, trials of no drafts apart."""
        return self._bucket(batch_size).num_draft_tokens > 0 if self._adaptive else self.max_width > 0

    def observe(self, chains: Sequence[tuple[int, int]], ms: float | None) -> None:
        """A decode step: for each request how many drafts were asked for, and how many were accepted; and how long it
        took, drafter and waiting for the host included (``None``: not known, or not typical)."""
        if not self._adaptive or not chains:
            return
        bucket, most = self._bucket(len(chains)), max(asked for asked, _ in chains)
        if ms is not None:
            bucket.took(most, ms)
        for other in self._buckets if most else ():
            other.age()
        for i in range(most):
            reached = [accepted > i for asked, accepted in chains if asked > i and accepted >= i]
            bucket.tried[i] += len(reached)
            bucket.accepted[i] += sum(reached)
        trial = bucket.trial(self.max_width)
        if not trial or most > 0:  # nobody drafts: a trial of drafts waits for a request that can
            bucket.count()
        if bucket.steps % TRIAL == 0 and bucket.trial(self.max_width) is None:
            bucket.num_draft_tokens = self._best(bucket)

    def tokens(self, batch_size: int) -> list[float]:
        """Expected output tokens of a step at each number of drafts."""
        bucket, rate = self._bucket(batch_size), PRIOR
        expected, reached = [1.0], 1.0
        for i in range(self.max_width):
            tried, hits = (sum(getattr(b, name)[i] for b in self._buckets) for name in ("tried", "accepted"))
            everywhere = (hits + 2.0 * rate) / (tried + 2.0)
            rate = (bucket.accepted[i] + 2.0 * everywhere) / (bucket.tried[i] + 2.0)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected

    def _best(self, bucket: Bucket) -> int:
        """The number of highest rate, unless the present one is almost as good; the present one while times are not
        known yet."""
        times = [bucket.ms(k) for k in range(self.max_width + 1)]
        expected = self.tokens(BUCKETS[self._buckets.index(bucket)])
        rates = [tokens / ms for tokens, ms in zip(expected, times, strict=True) if ms and ms > 0.0]
        if len(rates) != len(times):
            return bucket.num_draft_tokens
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > GAIN * rates[bucket.num_draft_tokens] else bucket.num_draft_tokens

    def _bucket(self, batch_size: int) -> Bucket:
        return self._buckets[max(0, bisect(BUCKETS, batch_size) - 1)]
