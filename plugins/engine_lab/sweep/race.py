"""Makes the runs of a sweep, round after round."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from engine_lab.sweep.record import HEADROOM, SCREENING, Experiment, Round, Run
from engine_lab.sweep.rounds import LEAST_FINAL, next_round, order_of, seconds_of
from engine_lab.sweep.sampler import Sampler

Measure = Callable[[int, int, Round], Awaitable[Run]]
"""One run of a set, in a pass of a round."""


OVERRUN = 1.2
"""Of the budget, for the least passes of the round that decides: they fit when it began."""


class Race:
    """Makes what is missing of an experiment."""

    def __init__(
        self,
        experiment: Experiment,
        measure: Measure,
        by: str,
        keep: int,
        budget_s: float,
        seed: int,
        saved: Callable[[], None],
        say: Callable[[str], None],
        samples: int | None = None,
    ) -> None:
        """``saved`` is called after every run, ``say`` with what is being done. ``samples``: sets of the first round,
        if not all."""
        self._experiment, self._measure = experiment, measure
        self._by, self._keep, self._budget_s, self._seed = by, keep, budget_s, seed
        self._saved, self._say, self._samples = saved, say, samples

    async def run(self) -> None:
        """The last round goes on where it was, then come the others."""
        experiment = self._experiment
        asked = experiment.rounds[-1] if experiment.rounds else self._next()
        while asked is not None:
            await self.make(asked)
            if self._samples is not None and asked.kind == SCREENING:
                asked.candidates = [which for which in asked.candidates if experiment.runs_of(which)]
            asked = self._next()

    def _next(self) -> Round | None:
        """The round after the last, noted as one of the experiment; ``None``: there is none."""
        found = next_round(self._experiment, self._by, self._keep, self._budget_s)
        if found is not None:
            self._experiment.rounds.append(found)
        return found

    async def make(self, asked: Round) -> None:
        """The missing runs of a round. The first round ends where the time for the last one begins, a later one when
        the budget is spent; that of headroom is not in it."""
        experiment = self._experiment
        done = {(run.number, run.candidate) for run in experiment.runs}
        for number in range(asked.first, asked.first + asked.passes):
            for which in self._order(asked, number):
                candidate = experiment.candidates[which]
                if (number, which) in done or candidate.refused:
                    continue
                if self._is_over(asked):
                    return
                where = f"pass {number - asked.first + 1} of {asked.passes}"
                self._say(f"{asked.kind}, {sets(self._count(asked))}, {where}: {candidate.name}")
                run = await self._measure(which, number, asked)
                experiment.runs.append(run)
                experiment.elapsed_s += run.seconds
                if run.failed and asked.kind != HEADROOM and (number == 0 or not run.figures):
                    candidate.refused = run.failed
                self._saved()

    def _order(self, asked: Round, number: int) -> Iterable[int]:
        if self._samples is None or not self._is_sampled(asked):
            return order_of(self._seed, asked, number)
        return Sampler(self._experiment, self._by, self._samples, self._seed).picks()

    def _is_sampled(self, asked: Round) -> bool:
        return self._samples is not None and asked.kind == SCREENING and asked.first == 0

    def _count(self, asked: Round) -> int:
        count = len(asked.candidates)
        return min(count, self._samples or count) if self._is_sampled(asked) else count

    def _is_over(self, asked: Round) -> bool:
        experiment, reserve = self._experiment, 0.0
        if asked.kind == HEADROOM:
            return False
        if asked.kind == SCREENING:
            measured = [run.candidate for run in experiment.runs if not run.failed]
            if len(set(measured)) < self._keep:
                return False
            reserve = self._keep * LEAST_FINAL * seconds_of(experiment, measured)
        elif len(whole_passes(experiment, asked)) < LEAST_FINAL:
            return experiment.elapsed_s >= self._budget_s * OVERRUN
        return experiment.elapsed_s + reserve >= self._budget_s


def sets(count: int) -> str:
    return f"{count} set" if count == 1 else f"{count} sets"


def whole_passes(experiment: Experiment, asked: Round) -> list[int]:
    """Numbers of the passes in which every set of a round that is still in it was measured."""
    left = [one for one in asked.candidates if not experiment.candidates[one].refused]
    runs = [experiment.runs_of(one) for one in left]
    numbers = range(asked.first, asked.first + asked.passes)
    return [number for number in numbers if runs and all(number in found for found in runs)]
