"""What a step costs, learnt from the steps themselves: ``ms = base * weights + per_token * num_tokens``.

``weights`` is 1 but for mixtures of experts: more tokens read more of those.
"""

from __future__ import annotations

from engine.contracts.step_cost import Mixture, StepCost, StepWork

_FORGET = 0.98
"""Weight a sample keeps when the next one comes: a memory of about 50 steps."""
_TOLERANCE = 3.0
"""Residuals beyond this many typical ones count only as much as one at that distance (Huber)."""
_SCALE_RATE = 0.05
_MIN_VARIANCE = 0.01
"""Variance of token counts (tokens squared) below which the recent steps say nothing about the slope."""
_SPREADS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of mixtures: tokens of one text may go to much the same experts, and of others to any. Each has a line of its own."""
_GAIN, _LEAST_GAIN = 0.9, 0.1
"""So much less than those of the present line the errors of another one must be to replace it: as a share, and 0.2 % of
each step of the memory."""


class StepCostModel:
    """The line that has foretold recent steps best: one, or with mixtures one for each spread."""

    def __init__(self, mixtures: tuple[Mixture, ...] = ()) -> None:
        """``mixtures``: of the model."""
        self._lines = [_Line(mixtures, spread) for spread in (_SPREADS if mixtures else (1.0,))]
        self._best = self._lines[0]

    def observe(self, work: StepWork, ms: float, gap_ms: float | None = None) -> None:
        """A step took ``ms`` milliseconds, after the device had waited for ``gap_ms`` (``None``: for requests)."""
        num_tokens = work.num_tokens
        if num_tokens <= 0 or ms <= 0.0:
            return
        for line in self._lines:
            line.observe(num_tokens, ms)
        better = min(self._lines, key=lambda line: line.error)
        if better.error + _LEAST_GAIN < _GAIN * self._best.error:
            self._best = better

    def cost(self) -> StepCost:
        """The current line; both coefficients are at least 0."""
        return self._best.cost()


class _Line:
    """Weighted least squares with exponential forgetting, in constant time and memory per step.

    Errors are relative: each sample weighs ``1 / ms**2``, so that a few long prefill steps do not drown the short
    decode steps. Samples far off the line (a pause of the machine) are damped; if they persist, the idea of what is
    typical widens and the line follows. While all recent steps have the same size, the last known slope is kept.
    """

    def __init__(self, mixtures: tuple[Mixture, ...], spread: float) -> None:
        self._of_model = mixtures, spread
        self.error = 0.0
        """Sum of recent residuals, each relative to its step and at most 1."""
        # Sums of products: weights read (1 without mixtures), number of tokens, milliseconds.
        self._rr = self._rx = self._ry = self._xx = self._xy = 0.0
        self._typical = 0.0
        self._base = 0.0
        self._slope = 0.0
        self._num_samples = 0

    def observe(self, num_tokens: int, ms: float) -> None:
        weight = self._trust(num_tokens, ms) / (ms * ms)
        read, x, y = self.cost().weights(num_tokens), float(num_tokens), ms
        self._rr = _FORGET * self._rr + weight * read * read
        self._rx = _FORGET * self._rx + weight * read * x
        self._ry = _FORGET * self._ry + weight * read * y
        self._xx = _FORGET * self._xx + weight * x * x
        self._xy = _FORGET * self._xy + weight * x * y
        self._num_samples += 1
        self._solve()

    def cost(self) -> StepCost:
        return StepCost(self._base, self._slope, self._num_samples, *self._of_model)

    def _trust(self, num_tokens: int, ms: float) -> float:
        """Huber weight in (0, 1] of a sample, from its relative residual."""
        if self._num_samples < 2:
            return 1.0
        residual = abs(ms - self.cost().ms(StepWork(num_tokens=num_tokens))) / ms
        limit = _TOLERANCE * self._typical
        trust = 1.0 if residual <= limit else limit / residual
        self.error = _FORGET * self.error + min(residual, 1.0)
        # What is typical may at most double per memory length through damped samples, but does follow a real shift.
        self._typical += _SCALE_RATE * (min(residual, 2.0 * limit + 0.02) - self._typical)
        return max(trust, 1e-3)

    def _solve(self) -> None:
        mean_x, mean_y = self._rx / self._rr, self._ry / self._rr
        variance = self._xx / self._rr - mean_x * mean_x
        if variance > _MIN_VARIANCE:
            self._slope = max(0.0, (self._xy / self._rr - mean_x * mean_y) / variance)
        self._base = mean_y - self._slope * mean_x
        if self._base < 0.0:
            self._base = 0.0
            self._slope = self._xy / self._xx
