"""What a step costs, learnt from the steps themselves: one coefficient for each term of
:class:`~engine.contracts.step_cost.StepCost`.

Non-negative least squares with exponential forgetting, in constant time and memory per step. Errors are relative: each
sample weighs ``1 / ms**2``, so that a few long prefill steps do not drown the short decode steps. Drafts have a
coefficient of their own: verified beside few rows they cost other than tokens of a long prompt.

Real traffic moves terms together: while the same requests decode, their number stands still and only the context
grows. The descent begins at the last solution and stops after a few sweeps. So a coefficient that recent steps tell
nothing of stays as it is.

What is handed on to the next start, to plans and to simulations is a fit of the same steps with a long memory, since
the last steps of a process may all have decoded. There errors are relative to what was predicted: with ``1 / ms**2``
quick steps count for more than slow ones, and the fit lies below the mean of noisy steps. All coefficients of it are
then scaled so that it predicts what these steps took together: slow steps that were damped are part of that.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import chain
from math import inf
from operator import mul

import msgspec

from engine.contracts.step_cost import DraftCost, Mixture, StepCost, StepWork
from engine.loop.draft_cost import DraftCostModel, DraftFit, DraftSample, unusable_fit
from engine.loop.least_squares import solved, sweep
from engine.loop.step_errors import StepCostReport, StepErrorReport, StepErrors

TERMS = 6
_FORGET = 0.98
"""Weight a sample keeps when the next one comes: a memory of about 50 steps."""
_FORGET_LONG = 0.9999
"""The same of what is handed on: a memory of about 10,000 steps."""
_SWEEPS = 3
_LARGEST_UNIT = 1e9
_TOLERANCE = 3.0
"""Residuals beyond this many typical ones count only as much as one at that distance (Huber)."""
_SLOWEST = 20.0
"""As many times as long as predicted a step counts at most, in what all steps took together."""
_SCALE_RATE = 0.05
_GAP_RATE = 0.05
_SPREADS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of mixtures: tokens of one text may go to much the same experts, and of others to any. Each has a fit of its own."""
_GAIN, _LEAST_GAIN = 0.9, 0.1
"""So much less than those of the present fit the errors of another one must be to replace it: as a share, and 0.2 % of
each step of the memory."""


class FitState(msgspec.Struct, frozen=True):
    """What a fit hands on: of its long memory."""

    sums: tuple[tuple[float, ...], ...]
    """``[TERMS, TERMS + 1]``: weighted, of a term's products with every term, and with milliseconds."""
    coefficients: tuple[float, ...]
    typical: float
    """Relative residual."""
    totals: tuple[float, ...]
    """``[TERMS + 1]``: of every term, and of milliseconds."""


class StepCostState(msgspec.Struct, frozen=True):
    """What a :class:`StepCostModel` can go on from in another process."""

    fits: tuple[FitState, ...]
    best: int
    cost: StepCost
    errors: tuple[StepErrorReport, ...] = ()
    """Of the run that measured last: large ones where something else used the device, too."""
    drafts: DraftCost | None = None
    """``None``: nothing was drafted."""
    draft_fit: DraftFit | None = None


def usable(state: StepCostState, mixtures: tuple[Mixture, ...]) -> str | None:
    """Why a model with ``mixtures`` cannot go on from ``state``, which may come from anywhere; ``None``: it can."""
    cost = state.cost
    if cost.mixtures != mixtures or len(state.fits) != _num_fits(mixtures) or not 0 <= state.best < len(state.fits):
        return "it is of another model"
    numbers = [
        cost.base_ms,
        cost.per_row_ms,
        cost.per_token_ms,
        cost.per_decode_context_ms,
        cost.per_prefill_context_ms,
        cost.per_draft_ms,
    ]
    numbers += [cost.gap_ms, cost.spread, float(cost.num_samples), *(error.median_error for error in state.errors)]
    for fit in state.fits:
        if [len(row) for row in (fit.coefficients, *fit.sums, fit.totals)] != [TERMS, *[TERMS + 1] * (TERMS + 1)]:
            return f"expected sums of {TERMS} terms"
        numbers += [*chain(*fit.sums), *fit.coefficients, *fit.totals, fit.typical]
    if state.draft_fit is not None:
        if (problem := unusable_fit(state.draft_fit)) is not None:
            return problem
        numbers += state.draft_fit.numbers
    if state.drafts is not None:
        *coefficients, acceptance = astuple(state.drafts)
        numbers += [*coefficients, *acceptance]
    return None if all(0.0 <= number < inf for number in numbers) else "expected finite numbers from 0 on"


def _num_fits(mixtures: tuple[Mixture, ...]) -> int:
    return len(_SPREADS) if mixtures else 1


class StepCostModel:
    """The fit that has predicted recent steps best: one, or with mixtures one for each spread."""

    def __init__(self, mixtures: tuple[Mixture, ...] = (), state: StepCostState | None = None) -> None:
        """``mixtures``: of the model. ``state``: of an earlier run of the same model on the same device."""
        self._fits = [_Fit(StepCost(0.0, 0.0, 0, mixtures, spread)) for spread in _SPREADS[: _num_fits(mixtures)]]
        self._best = self._fits[0]
        self._cost = StepCost(0.0, 0.0, 0, mixtures)
        self._errors = StepErrors()
        self._drafts = DraftCostModel()
        self._mean_gap_ms, self._num_gaps = 0.0, 0
        """Of the long memory."""
        if state is not None:
            self._drafts = DraftCostModel(state.draft_fit)
            self._mean_gap_ms, self._num_gaps = state.cost.gap_ms, state.cost.num_samples
            for fit, kept in zip(self._fits, state.fits, strict=True):
                fit.resume(kept)
            self._best, self._cost = self._fits[state.best], state.cost

    def observe(self, work: StepWork, ms: float, gap_ms: float | None = None) -> None:
        """A step took ``ms`` milliseconds, after the device had waited for ``gap_ms`` (``None``: for requests)."""
        if work.num_tokens <= 0 or ms <= 0.0:
            return
        before = self._cost
        if before.num_samples:
            self._errors.add(work, before.ms(work) / ms - 1.0)
        for fit in self._fits:
            fit.observe(work, ms)
        if len(self._fits) > 1:
            better = min(self._fits, key=lambda fit: fit.error)
            if better.error + _LEAST_GAIN < _GAIN * self._best.error:
                self._best = better
        gap = before.gap_ms
        if gap_ms is not None:  # a pause of the machine counts as twice of what is typical
            gap += _GAP_RATE * (min(gap_ms, 2.0 * gap + 0.1) - gap)
            self._num_gaps += 1
            rate = max(1.0 - _FORGET_LONG, 1.0 / self._num_gaps)
            self._mean_gap_ms += rate * (min(gap_ms, ms) - self._mean_gap_ms)
        smallest, largest = before.smallest, before.largest
        if not before.num_samples:
            smallest = largest = work
        elif before.extrapolates(work):
            smallest, largest = smallest.least(work), largest.most(work)
        base, row, token, decode_context, prefill_context, draft = self._best.coefficients
        samples, of_model = before.num_samples + 1, self._best.of_model
        self._cost = StepCost(
            base, token, samples, of_model.mixtures, of_model.spread,
            row, decode_context, prefill_context, gap, smallest, largest, draft,
        )  # fmt: skip

    def observe_drafts(self, drafts: DraftSample) -> None:
        """What a drafter took for a step, and what became of the drafts that the step verified."""
        self._drafts.observe(drafts)

    def cost(self) -> StepCost:
        """As the steps so far say; no coefficient is negative."""
        return self._cost

    def report(self) -> StepCostReport:
        """The same, and how far it was off lately."""
        return StepCostReport(self._cost, self._errors.reports())

    def state(self) -> StepCostState:
        """With a cost of the long memory, unlike :meth:`cost`. Its gap is the mean: pauses are part of what requests
        see, if not of what a step may be planned with."""
        fits, best = tuple(fit.state() for fit in self._fits), self._fits.index(self._best)
        base, row, token, decode_context, prefill_context, draft = fits[best].coefficients
        cost = replace(
            self._cost,
            base_ms=base,
            per_row_ms=row,
            per_token_ms=token,
            per_decode_context_ms=decode_context,
            per_prefill_context_ms=prefill_context,
            per_draft_ms=draft,
            gap_ms=self._mean_gap_ms,
        )
        return StepCostState(fits, best, cost, self._errors.reports(), self._drafts.cost(), self._drafts.fit())


class _Fit:
    """Samples far off the fit (a pause of the machine) are damped; if they persist, the idea of what is typical widens
    and the fit follows."""

    def __init__(self, of_model: StepCost) -> None:
        """``of_model``: with its mixtures, and the spread that is assumed."""
        self.of_model = of_model
        self.coefficients = [0.0] * TERMS
        """Of weights, rows, tokens but drafts, decode context, prefill context, drafts: milliseconds."""
        self.error = 0.0
        """Sum of recent residuals, each relative to its step and at most 1."""
        self._sums = [[0.0] * (TERMS + 1) for _ in range(TERMS)]
        """See :attr:`FitState.sums`."""
        self._long_sums = [[0.0] * (TERMS + 1) for _ in range(TERMS)]
        """In units that grow with every sample, which is quicker than to let all older ones lose weight."""
        self._totals = [0.0] * (TERMS + 1)
        """See :attr:`FitState.totals`; in the same units."""
        self._unit = 1.0
        self._num_samples = 0
        self._typical = 0.0

    def resume(self, state: FitState) -> None:
        share = (1.0 - _FORGET_LONG) / (1.0 - _FORGET)
        self._sums = [[share * total for total in row] for row in state.sums]
        self._long_sums, self._totals, self._unit = [list(row) for row in state.sums], list(state.totals), 1.0
        self.coefficients = list(state.coefficients)
        self._typical = state.typical
        self._num_samples = 2

    def state(self) -> FitState:
        self._in_plain_units()
        coefficients = solved(self._long_sums, self.coefficients)
        *terms, ms = self._totals
        predicted = sum(map(mul, terms, coefficients))
        scale = ms / predicted if predicted > 0.0 else 1.0
        sums = tuple(map(tuple, self._long_sums))
        return FitState(sums, tuple([scale * each for each in coefficients]), self._typical, tuple(self._totals))

    def observe(self, work: StepWork, ms: float) -> None:
        terms = (
            self.of_model.weights(work.num_tokens) if self.of_model.mixtures else 1.0,
            work.num_rows,
            work.num_tokens - work.num_drafts,
            work.decode_context,
            work.prefill_context,
            work.num_drafts,
        )
        predicted = sum(map(mul, terms, self.coefficients))
        trust = self._trust(predicted, ms)
        expected = min(max(predicted, ms / 2.0), 2.0 * ms)
        weight, sample = trust / (ms * ms), (*terms, ms)
        for term, row in zip(terms, self._sums, strict=True):
            scale = weight * term
            row[:] = [_FORGET * total + scale * value for total, value in zip(row, sample, strict=True)]
        self._unit /= _FORGET_LONG
        weight = self._unit * trust / (expected * expected)
        for term, row in zip(terms, self._long_sums, strict=True):
            if term:
                scale = weight * term
                row[:] = [total + scale * value for total, value in zip(row, sample, strict=True)]
        counted = (*terms, min(ms, _SLOWEST * predicted) if self._num_samples > 1 else ms)
        self._totals = [total + self._unit * value for total, value in zip(self._totals, counted, strict=True)]
        if self._unit > _LARGEST_UNIT:
            self._in_plain_units()
        self._num_samples += 1
        self._solve()

    def _in_plain_units(self) -> None:
        self._long_sums = [[total / self._unit for total in row] for row in self._long_sums]
        self._totals = [total / self._unit for total in self._totals]
        self._unit = 1.0

    def _trust(self, predicted: float, ms: float) -> float:
        """Huber weight in (0, 1] of a sample, from its relative residual."""
        if self._num_samples < 2:
            return 1.0
        residual = abs(ms - predicted) / ms
        limit = _TOLERANCE * self._typical
        trust = 1.0 if residual <= limit else limit / residual
        self.error = _FORGET * self.error + min(residual, 1.0)
        # What is typical may at most double per memory length through damped samples, but does follow a real shift.
        self._typical += _SCALE_RATE * (min(residual, 2.0 * limit + 0.02) - self._typical)
        return max(trust, 1e-3)

    def _solve(self) -> None:
        """From the last solution on: a coefficient that no sample tells of stays as it is."""
        for _ in range(_SWEEPS):
            sweep(self._sums, self.coefficients)
