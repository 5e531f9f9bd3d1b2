"""Which set of a large grid is measured next: as Optuna's TPE sampler picks it from what was measured so far.

Tree-structured Parzen estimator: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import log
from typing import TYPE_CHECKING, Any

from engine_lab.sweep.figures import BY_KEY
from engine_lab.sweep.record import Candidate, Experiment

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

FIRST = 10
"""Sets that are drawn by chance before the sampler has enough to go by."""
MOST_ASKED = 50
"""Times it is asked for a set that can be measured and was not."""


def check_sampler() -> None:
    """Raises ``ValueError`` where Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ValueError("--samples needs Optuna: pip install 'engine[optuna]'")


class Sampler:
    """Picks sets of the grid, one after the other. What has no value on any axis, as a baseline, comes first."""

    def __init__(self, experiment: Experiment, by: str, count: int, seed: int) -> None:
        """``count``: sets to measure, with those that were."""
        self._experiment, self._by, self._count, self._seed = experiment, by, count, seed
        self._axes = axes_of(experiment.candidates)
        self._points = {self._point(one): one.id for one in reversed(experiment.candidates)}

    def picks(self) -> Iterator[int]:
        """Ids, each after the run of the one before it was saved. A set whose run failed is not counted."""
        for one in self._experiment.able():
            if self._axes and set(self._point(one)) == {None} and not self._is_measured(one.id):
                yield one.id
        while len({run.candidate for run in self._experiment.runs if not run.failed}) < self._count:
            free = [one.id for one in self._experiment.able() if not self._is_measured(one.id)]
            if not free:
                return
            yield self._pick(free)

    def _is_measured(self, which: int) -> bool:
        return any(run.candidate == which for run in self._experiment.runs)

    def _point(self, candidate: Candidate) -> tuple[str | None, ...]:
        """Its value on every axis."""
        values = dict(map(_key_value, candidate.words))
        return tuple(values.get(key) for key in self._axes)

    def _pick(self, free: Sequence[int]) -> int:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = f"{self._seed}/{len(self._experiment.runs)}"
        sampler = optuna.samplers.TPESampler(n_startup_trials=FIRST, seed=random.Random(seed).getrandbits(32))
        study = optuna.create_study(sampler=sampler)
        distributions = {key: _distribution(values) for key, values in self._axes.items()}
        study.add_trials(self._trials(distributions))
        for _ in range(MOST_ASKED):
            trial = study.ask(distributions)
            which = self._points.get(tuple(self._axes[key][trial.params[key]] for key in self._axes))
            if which is not None and which in free:
                return which
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return random.Random(seed).choice(free)

    def _trials(self, distributions: dict[str, BaseDistribution]) -> list[FrozenTrial]:
        """What was measured. A set whose run failed says nothing."""
        from optuna.trial import create_trial

        found = []
        for run in self._experiment.runs:
            point = self._point(self._experiment.candidates[run.candidate])
            value = run.figures.get(self._by)
            known = [at for at in point if at is not None]
            if not value or len(known) < len(point):
                continue
            params = {key: self._axes[key].index(at) for key, at in zip(self._axes, known, strict=True)}
            value = log(BY_KEY[self._by].worse(value))
            found.append(create_trial(params=params, distributions=distributions, value=value))
        return found


def axes_of(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """By key the values that sets have of it, where these differ; numbers from the least on."""
    found: dict[str, dict[str, None]] = {}
    for one in candidates:
        for key, value in map(_key_value, one.words):
            found.setdefault(key, {})[value] = None
    return {key: _in_order(list(values)) for key, values in found.items() if len(values) > 1}


def _key_value(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+"), value


def _in_order(values: list[str]) -> list[str]:
    return sorted(values, key=float) if _are_numbers(values) else values


def _are_numbers(values: Sequence[str]) -> bool:
    with suppress(ValueError):
        return bool([float(value) for value in values])
    return False


def _distribution(values: Sequence[str]) -> Any:
    """Over places in the list: neighbours of a number are near it, options are not near each other."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    count = len(values)
    return IntDistribution(0, count - 1) if _are_numbers(values) else CategoricalDistribution(tuple(range(count)))
