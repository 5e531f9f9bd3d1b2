"""The lines in which a set differs from the baseline, and the sets without each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.assembly.assemble import assemble
from engine_lab.sweep.grid import candidates_of, essence_of, negotiate
from engine_lab.sweep.record import Candidate, Experiment

BASELINE = "baseline"
WITHOUT = "without "


def tuned_sets(base: Sequence[str], grid: Sequence[str], config_dirs: Sequence[Path]) -> list[Candidate]:
    """The baseline and the sets of the grid. Raises :class:`~engine.assembly.errors.AssemblyError`, of the baseline,
    too."""
    assemble(base, config_dirs=config_dirs, download=True)
    found = candidates_of([*base, *grid], config_dirs)
    every = [Candidate(0, BASELINE, tuple(base)), *(Candidate(one.id + 1, one.name, one.words) for one in found)]
    negotiate(every, config_dirs)
    return every


def baseline_of(experiment: Experiment) -> Candidate:
    return next(one for one in experiment.candidates if one.name == BASELINE)


def lines_of(candidate: Candidate, baseline: Candidate, config_dirs: Sequence[Path]) -> tuple[str, ...]:
    """The overrides without which the plan would be another one."""
    words = list(candidate.words)
    plan = essence_of(assemble(words, config_dirs=config_dirs))
    for word in candidate.words[len(baseline.words) :]:
        fewer = without(words, word)
        if _plan(fewer, config_dirs) == plan:
            words = fewer
    return tuple(words[len(baseline.words) :])


def without(words: Sequence[str], line: str) -> list[str]:
    """The words but the last one that is this line."""
    place = len(words) - 1 - list(words)[::-1].index(line)
    return [*words[:place], *words[place + 1 :]]


def _plan(words: Sequence[str], config_dirs: Sequence[Path]) -> bytes | None:
    from engine.assembly.errors import AssemblyError

    try:
        return essence_of(assemble(words, config_dirs=config_dirs))
    except AssemblyError:
        return None


def left_out(
    experiment: Experiment, chosen: Candidate, lines: Sequence[str], config_dirs: Sequence[Path]
) -> list[Candidate]:
    """Further sets: ``chosen`` without each of its lines. One line alone is what the baseline is without."""
    if len(lines) < 2:
        return []
    words = (*baseline_of(experiment).words, *lines)
    first = len(experiment.candidates)
    found = [
        Candidate(first + i, f"{WITHOUT}{line}", tuple(without(words, line)), is_beside=True)
        for i, line in enumerate(lines)
    ]
    negotiate(found, config_dirs, keep_equal=True)
    return found
