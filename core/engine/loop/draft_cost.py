"""What drafting adds to a round of decoding, and what it takes to keep a drafter ready."""

from __future__ import annotations

_FORGET_COST = 0.97
"""What the measured cost of drafting keeps of its weight from round to round."""
_ROUNDS_BELIEVED, _OUTLIER = 8.0, 4.0
"""From so many rounds on, one that costs more than so many times what is expected counts as no more than that."""
_MIN_VARIANCE = 0.01
"""Variance of widths below which the recent rounds say nothing about the cost per token."""
_FORGET_KEEPING_UP, _MOST_KEEPING_UP = 0.97, 0.25
"""What is known of it keeps that much of its weight from step to step, and no step counts as a larger share."""


class DraftCost:
    """What drafting adds to a round: a mean for rounds without drafts, ``ms = fixed + per_token * width`` for others;
    least squares with forgetting.

    The two differ by more than a token: a drafter that nobody asks does less, and later. Until a second width is seen,
    all that drafting adds is taken to be per token; while all recent rounds have the same width, the last known cost
    per token is kept.
    """

    def __init__(self) -> None:
        self._idle_weight = self._idle = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._per_token: float | None = None

    def observe(self, width: int, ms: float) -> None:
        """A round in which up to ``width`` tokens were drafted, 0 included, spent ``ms`` milliseconds on that."""
        keep = _FORGET_COST
        if width == 0:
            ms = self._believed(self._idle_weight, 0, ms)
            self._idle_weight = keep * self._idle_weight + 1.0
            self._idle = keep * self._idle + ms
            return
        ms = self._believed(self._weight, width, ms)
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + width
        self._y = keep * self._y + ms
        self._xx = keep * self._xx + width * width
        self._xy = keep * self._xy + width * ms
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > _MIN_VARIANCE:
            self._per_token = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)

    @property
    def drafted(self) -> bool:
        """Whether a round with drafts was seen."""
        return self._weight > 0.0

    def _believed(self, weight: float, width: int, ms: float) -> float:
        """A pause of the machine is no property of drafting."""
        return min(ms, _OUTLIER * self.ms(width) + 0.1) if weight > _ROUNDS_BELIEVED else ms

    def ms(self, width: int) -> float:
        """The cost of a round of this width; 0 before anything was measured."""
        idle = self._idle / self._idle_weight if self._idle_weight else 0.0
        if self._weight == 0.0 or (width == 0 and self._idle_weight):
            return idle
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        # At no width less than without drafts: drafting nothing is never dearer.
        steepest = max(0.0, mean_y - idle) / mean_x
        slope = steepest if self._per_token is None else min(steepest, self._per_token)
        return max(idle, mean_y + slope * (width - mean_x))


class KeepingUp:
    """What it takes to tell a drafter of steps that nobody drafts behind, of which it may be told later."""

    def __init__(self) -> None:
        self._ms = self._steps_ms = 0.0

    def observe(self, step_ms: float, ms: float, late_ms: float, late_steps: int) -> None:
        """A step of ``step_ms`` took ``ms`` more, and ``late_ms`` before it went to ``late_steps`` earlier ones."""
        most = _MOST_KEEPING_UP * step_ms
        self._steps_ms = _FORGET_KEEPING_UP * self._steps_ms + step_ms
        self._ms = _FORGET_KEEPING_UP * self._ms + min(ms, most) + min(late_ms, late_steps * most)

    @property
    def share(self) -> float:
        """Of a step."""
        return self._ms / self._steps_ms if self._steps_ms else 0.0
