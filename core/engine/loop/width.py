"""How many tokens to draft: the width with the most expected tokens per millisecond, 0 included.

A chain whose tokens stand with rate ``a`` each, given that those before them stood, yields ``1 + a + ... + a**k``
tokens on average (Leviathan et al., arXiv:2211.17192); its step computes ``batch * (1 + k)`` tokens. Drafting has a
cost that a round always has (a drafter on the device keeps up with the target; the device waits for a host that looks
at tokens) and one for each token. All of it is measured while serving; nothing here influences *which* tokens come out.

Drafting that does not pay is *off*: probed now and then, with a drafter that keeps up. Where keeping up alone is dear,
drafting that has been off for long is *at rest*: running requests are given up, and only new ones are probed with.
"""

from __future__ import annotations

from bisect import bisect

from engine.contracts.scheduler import StepCost
from engine.loop.acceptance import AcceptanceRate, Chains, rate_of_mean
from engine.loop.draft_cost import DraftCost, KeepingUp

_BUCKETS = (1, 2, 4, 8, 16, 32)
_FORGET = 0.97
"""What a chain's evidence keeps of its weight when the next chain comes."""
_FORGET_PROBING, _MOST_PROBED = 0.8, 4
"""The same while drafting is off: probes are rare, so each must count for more. Of its chains, so many forget: however
many are probed at once, two probes before this one still count."""
_PRIOR_RATE = 0.6
_GAIN_TO_WIDEN, _GAIN_TO_NARROW = 1.05, 1.01
"""A new width must promise this much more than the present one. Useless drafts cost little where memory is the
limit, but they still cost, so narrowing is the easier way."""
_LEARN_STEP, _MOST_OFF = 0.1, 2.0
"""What a step adds to how far steps of its kind are off the line of all steps, and how far that is at most."""
_RECONSIDER = 8
"""How often a width is asked for until one is chosen anew, if nothing but costs changed."""
_FIRST_PROBE, _SOONEST_PROBE, _LATEST_PROBE = 16, 4, 256
"""Steps between probes: sooner after a promising one, later after others."""
_SOONER = 4
"""How many times sooner."""
_PATIENCE = 8
"""Steps after which a probe ends that nobody could take part in."""
_REST_FROM = 8 * _FIRST_PROBE
"""Steps between probes from which on drafting that is off may rest: three came to nothing, one after the other."""
_PROBED = 8
"""Chains of a probe at rest, or as many as requests decode together: few requests take part, one perhaps."""
_DEAR = 0.03
"""Share of a step without drafts from which on keeping up is dear."""


class _Bucket:
    """What is known about one range of batch sizes."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceRate()
        self.cost = DraftCost()
        self.keeping_up = KeepingUp()
        self.answered = 1.0
        """Share of the requests asked about for which the drafter had something to say."""
        self.off = [1.0, 1.0]
        """What steps without and with drafts take, by what they were expected to: kernels for few rows are others than
        those for many, so no line holds for both."""
        self.width: int | None = None
        self.chosen_for: int | None = None
        """Batch size that ``width`` was chosen for; ``None`` when something about drafts was learnt since."""
        self.asked = 0
        """How often for a width, since it was chosen."""
        self.probing = False
        """Drafting is off, and one token is drafted for each request until it is known what comes of it."""
        self.seen = Chains(0, 0, 0)
        """In probes at rest, since one was judged."""
        self.idle_steps = 0
        """Since the last probe, or since this one began."""
        self.probe_every = _FIRST_PROBE

    @property
    def at_rest(self) -> bool:
        return self.width == 0 and self.probe_every >= _REST_FROM and self.keeping_up.share > _DEAR

    def idle(self) -> None:
        """A step without drafts."""
        self.idle_steps += 1
        if not self.probing and self.idle_steps >= self.probe_every:
            self._probe(True)
        # At rest it waits for a new request.
        elif self.probing and self.idle_steps >= _PATIENCE and not self.at_rest:
            self._probe(False)

    def _probe(self, probing: bool) -> None:
        self.probing, self.idle_steps = probing, 0

    def missed(self) -> None:
        """The drafts of a probe were dropped: where requests come together and the first ones soon end, that would
        happen time and again. The next probe comes soon all the same, for this one has shown nothing."""
        if self.probing:
            self._probe(False)
            self.idle_steps = max(0, self.probe_every - _FIRST_PROBE)

    def probed(self, promising: bool) -> None:
        """The probe is over."""
        self._probe(False)
        self.seen = Chains(0, 0, 0)
        if promising:
            self.probe_every = max(_SOONEST_PROBE, self.probe_every // _SOONER)
        else:
            self.probe_every = min(_LATEST_PROBE, 2 * self.probe_every)


class WidthController:
    """Chooses draft widths per batch-size bucket (1, 2, 4, 8, 16, 32 and more). Deterministic."""

    def __init__(self, max_width: int, adaptive: bool = True) -> None:
        self.max_width = max_width
        self._adaptive = adaptive
        self._overall = AcceptanceRate()
        self._buckets = [_Bucket() for _ in _BUCKETS]
        self._asker: _Bucket | None = None
        """What asked for the drafts on their way, whoever verifies them; ``None``: the batch that verifies them did."""
        self._cost = StepCost(0.0, 0.0, 0)
        """As it was last."""

    def width(self, batch_size: int, cost: StepCost) -> int:
        """Draft tokens wanted for each request of the next step: 0 .. ``max_width``.

        ``batch_size``: requests decoding together.
        """
        if not self._adaptive or self.max_width == 0:
            return self.max_width
        self._cost = cost
        bucket = self._buckets[_bucket_index(batch_size)]
        bucket.asked += 1
        if bucket.chosen_for != batch_size or bucket.asked >= _RECONSIDER:
            bucket.width, bucket.chosen_for = self._best(bucket, batch_size, cost), batch_size
            bucket.asked = 0
        assert bucket.width is not None
        return bucket.width or int(bucket.probing)

    def probes(self, batch_size: int) -> bool:
        """Whether what is drafted at this batch size is only to see how it would fare."""
        bucket = self._buckets[_bucket_index(batch_size)]
        return bucket.probing and bucket.width == 0

    def asked_for(self, batch_size: int) -> None:
        """Drafts for a batch of this size are on their way."""
        self._asker = self._buckets[_bucket_index(batch_size)]

    def dropped(self) -> None:
        """Drafts came, but are not wanted: fewer requests decode now, or more."""
        if self._asker is not None:
            self._asker.missed()

    def rests(self, batch_size: int) -> bool:
        """Whether a drafter need not keep up any more with the requests that decode together now."""
        bucket = self._buckets[_bucket_index(batch_size)]
        return bucket.at_rest and not bucket.probing

    def observe(self, batch_size: int, chains: int, drafted: int, accepted: int) -> None:
        """What one step's drafts came to: ``accepted`` of ``drafted`` tokens in ``chains`` requests stood. A step
        without drafts says nothing about acceptance, but is to be told of, too."""
        if self.max_width == 0 or not self._adaptive:
            return
        if drafted <= 0:
            bucket = self._buckets[_bucket_index(batch_size)]
            if bucket.width == 0:
                bucket.idle()
            return
        bucket = self._learning(batch_size)
        if self._asker is not None:
            bucket = self._asker
        # Drafts that were asked for before drafting went off are no probe.
        probe = bucket.probing and bucket.width == 0
        if probe and bucket.at_rest:
            seen = bucket.seen
            chains, drafted, accepted = chains + seen.chains, drafted + seen.drafted, accepted + seen.accepted
            if chains < min(batch_size, _PROBED):
                bucket.seen = Chains(chains, drafted, accepted)
                return
        forget = _FORGET_PROBING if probe else _FORGET
        for acceptance in (bucket.acceptance, self._overall):
            acceptance.observe(chains, drafted, accepted, forget, min(chains, _MOST_PROBED) if probe else chains)
        if probe:
            rate = rate_of_mean(accepted / chains, drafted / chains)
            bucket.probed(self._would_draft(bucket, batch_size, rate))
        elif bucket.width:
            bucket.probing, bucket.probe_every = False, _FIRST_PROBE

    def observe_answers(self, batch_size: int, asked: int, answered: int) -> None:
        """A drafter was asked about ``asked`` requests and drafted for ``answered`` of them."""
        if asked <= 0:
            return
        bucket = self._learning(batch_size)
        probe = bucket.probing and bucket.width == 0
        keep = _FORGET_PROBING if probe else _FORGET**asked
        bucket.answered += (1.0 - keep) * (answered / asked - bucket.answered)
        if probe and answered == 0:
            bucket.probed(promising=False)

    def observe_cost(self, batch_size: int, width: int, ms: float) -> None:
        """What drafting up to ``width`` tokens for each of a batch added to a round of decoding, in milliseconds;
        also for rounds of width 0, whose cost is the one that drafting always has."""
        if self.max_width > 0:
            self._buckets[_bucket_index(batch_size)].cost.observe(width, ms)

    def observe_keeping_up(
        self, batch_size: int, step_ms: float, ms: float, late_ms: float = 0.0, late_steps: int = 0
    ) -> None:
        """Behind a step of ``step_ms`` milliseconds that nobody drafts behind, telling a drafter on the device of it
        took ``ms``; before it, telling it of ``late_steps`` earlier ones took ``late_ms``."""
        if self.max_width > 0 and self._adaptive and step_ms > 0.0:
            self._buckets[_bucket_index(batch_size)].keeping_up.observe(step_ms, ms, late_ms, late_steps)

    def observe_step(self, batch_size: int, num_tokens: int, ms: float) -> None:
        """A step in which ``batch_size`` requests decoded, drafts among ``num_tokens``, took ``ms`` milliseconds."""
        expected = self._cost.ms(num_tokens) if self._cost.num_samples else 0.0
        if self.max_width > 0 and self._adaptive and expected > 0.0:
            off, drafted = self._buckets[_bucket_index(batch_size)].off, num_tokens > batch_size
            ratio = min(max(ms / expected, 1.0 / _MOST_OFF), _MOST_OFF)
            off[drafted] += _LEARN_STEP * (ratio - off[drafted])

    def _learning(self, batch_size: int) -> _Bucket:
        """The bucket of a batch size, about to learn something, which all others may profit from."""
        for bucket in self._buckets:
            bucket.chosen_for = None
        return self._buckets[_bucket_index(batch_size)]

    def _best(self, bucket: _Bucket, batch_size: int, cost: StepCost) -> int:
        """The width of highest rate, unless the present one is almost as good."""
        rate = bucket.acceptance.rate(self._overall.rate(_PRIOR_RATE))
        speeds = self._speeds(bucket, batch_size, cost, rate)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        present = bucket.width
        if present is None or best == present:
            return best
        gain = _GAIN_TO_WIDEN if best > present else _GAIN_TO_NARROW
        return best if speeds[best] >= gain * speeds[present] else present

    def _would_draft(self, bucket: _Bucket, batch_size: int, rate: float) -> bool:
        """Whether it would pay if drafts stood with this rate."""
        speeds = self._speeds(bucket, batch_size, self._cost, rate)
        return max(speeds) > speeds[0]

    def _speeds(self, bucket: _Bucket, batch_size: int, cost: StepCost, rate: float) -> list[float]:
        """Expected tokens per millisecond at each width, ``rate`` being that of drafts that stand."""
        speeds: list[float] = []
        drafting = self._cost_of_drafting(batch_size)
        expected, chain = 1.0, bucket.answered
        for width in range(self.max_width + 1):
            if width:
                chain *= rate
                expected += chain
            step_ms = bucket.off[width > 0] * cost.ms(round(batch_size * (1 + bucket.answered * width)))
            ms = step_ms + drafting.ms(width)
            speeds.append(expected / ms if cost.num_samples and ms > 0.0 else expected)
        return speeds

    def _cost_of_drafting(self, batch_size: int) -> DraftCost:
        """As measured for so many requests or, until it was, for fewer: it is no less for more of them."""
        costs = [bucket.cost for bucket in self._buckets[: _bucket_index(batch_size) + 1]]
        return next((cost for cost in reversed(costs) if cost.drafted), costs[-1])


def _bucket_index(batch_size: int) -> int:
    return max(0, bisect(_BUCKETS, batch_size) - 1)
