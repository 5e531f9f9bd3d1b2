"""Entry of ``engine sweep``: words in; a folder, a table and a page out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.console import Console

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench.target import open_session
from engine_lab.shared.errors import complain
from engine_lab.shared.output import check_folder, write_json
from engine_lab.shared.progress import status_line
from engine_lab.shared.servers import Servers
from engine_lab.shared.signals import ends_cleanly
from engine_lab.sweep.analysis import summarise_sweep
from engine_lab.sweep.grid import candidates_of
from engine_lab.sweep.load import check_inputs
from engine_lab.sweep.measure import Measure
from engine_lab.sweep.options import SweepOptions, options_of
from engine_lab.sweep.order import order_candidates
from engine_lab.sweep.page import page
from engine_lab.sweep.quality import measure_quality
from engine_lab.sweep.race import Race
from engine_lab.sweep.record import Candidate, Experiment, load, save
from engine_lab.sweep.screen import render
from engine_lab.sweep.table import write_csv
from engine_lab.sweep.wording import refusals

RESULTS = "results.json"


def run(flags: argparse.Namespace, overrides: list[str]) -> int:
    """Run ``engine sweep`` with parsed flags; returns the exit status. Raises
    :class:`~engine.assembly.errors.AssemblyError`, which is wrong usage."""
    try:
        options = options_of(flags)
        folder = options.folder_of(overrides, "sweep")
        check_folder(folder, "--folder")
        experiment = new_or_resumed(
            overrides, options, folder, lambda: candidates_of(overrides, options.config_dirs, options.keep_equal)
        )
    except ValueError as error:
        return complain("sweep", error, USAGE)

    def saved() -> None:
        save(experiment, folder / RESULTS)

    for line in refusals(experiment):
        print(line, file=sys.stderr)
    status = OK
    try:
        with ends_cleanly(), status_line() as say:
            asyncio.run(sweep(experiment, options, saved, say))
    except ValueError as error:
        return complain("sweep", error, USAGE)
    except (RuntimeError, OSError) as error:
        status = complain("sweep", error, FAILED)
    except KeyboardInterrupt:
        status = complain("sweep", f"interrupted; the same command goes on ({folder})", INTERRUPTED)
    experiment.summary = summarise_sweep(experiment, options)
    report(experiment, folder)
    return status if status != OK or any(not run.failed for run in experiment.runs) else FAILED


def report(experiment: Experiment, folder: Path) -> None:
    """What was found: on the screen and in the folder."""
    save(experiment, folder / RESULTS)
    write_csv(experiment, folder / "results.csv")
    (folder / "report.html").write_text(page(experiment), encoding="utf-8")
    Console().print(render(experiment))
    Console().print(
        f"{folder}: plan.json, {RESULTS}, results.csv, report.html", soft_wrap=True, highlight=False, markup=False
    )


async def sweep(
    experiment: Experiment, options: SweepOptions, saved: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Make what is missing of ``experiment``."""
    await measure_quality(experiment, options, saved, say)
    async with measuring(experiment, options) as measure:
        seed, samples = options.load.seed, options.samples
        race = Race(experiment, measure, options.by, options.keep, options.budget_s, seed, saved, say, samples)
        await race.run()


@contextlib.asynccontextmanager
async def measuring(experiment: Experiment, options: SweepOptions) -> AsyncIterator[Measure]:
    """What makes runs, with engines that are stopped however it ends."""
    with tempfile.TemporaryDirectory(prefix="engine-sweep-") as logs:
        async with open_session(options.load.timeout_s) as session:
            servers = Servers(session, [str(path) for path in options.config_dirs], Path(logs))
            try:
                yield Measure(session, servers, options, experiment)
            finally:
                await servers.close()


def new_or_resumed(
    words: list[str], options: SweepOptions, folder: Path, sets: Callable[[], list[Candidate]]
) -> Experiment:
    """Raises ``ValueError`` if the folder is of something else, or what is sent cannot be read, and
    :class:`~engine.assembly.errors.AssemblyError`; then no folder was made."""
    check_inputs(options.load)
    file = folder / RESULTS
    asked = {"words": list(words)} | options.fixed()
    if file.exists():
        found = load(file)
        then = {"words": list(found.words)} | found.options
        if different := [key for key, value in asked.items() if then.get(key) != value]:
            key = different[0]
            raise ValueError(f"{folder}: was made with {key} {then.get(key)}, not {asked[key]}; give another --folder")
        return found
    experiment = Experiment(tuple(words), options.fixed())
    experiment.candidates = sets()
    order = order_candidates(experiment, options)
    places = {which: place for place, which in enumerate(order)}
    experiment.candidates.sort(key=lambda one: places.get(one.id, len(order)))
    _renumber(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(str(folder / "plan.json"), plan_of(experiment, options))
    return experiment


def _renumber(experiment: Experiment) -> None:
    """Ids are places in the list."""
    ids = {one.id: place for place, one in enumerate(experiment.candidates)}
    for one in experiment.candidates:
        one.id = ids[one.id]
        one.same_as = None if one.same_as is None else ids[one.same_as]


def plan_of(experiment: Experiment, options: SweepOptions) -> dict[str, object]:
    """What is going to be measured, for readers."""
    return {
        "words": experiment.words,
        "options": experiment.options,
        "budget_s": options.budget_s,
        "order": experiment.order,
        "sets": [
            {
                "id": one.id,
                "name": one.name,
                "overrides": one.words,
                "refused": one.refused,
                "same_as": one.same_as,
                "predicted": one.predicted,
            }
            for one in experiment.candidates
        ],
    }
