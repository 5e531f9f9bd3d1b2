"""Entry of ``engine tune``: an SLO in; a preset with its evidence out, or that there is none to name."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.shared.errors import complain
from engine_lab.shared.output import check_folder, check_writable
from engine_lab.shared.progress import status_line
from engine_lab.shared.signals import ends_cleanly
from engine_lab.sweep.analysis import summarise_sweep
from engine_lab.sweep.main import RESULTS, measuring, new_or_resumed, report, sweep
from engine_lab.sweep.race import Race
from engine_lab.sweep.record import PROOF, Experiment, save
from engine_lab.sweep.wording import refusals
from engine_lab.tune.headroom import raise_load
from engine_lab.tune.lines import baseline_of, lines_of, tuned_sets
from engine_lab.tune.options import TuneOptions, split, tune_options_of
from engine_lab.tune.preset import write_preset
from engine_lab.tune.proof import BY, choose, proof_round, prove
from engine_lab.tune.wording import evidence

NONE = 3
"""Exit status where no set is named."""


def run(flags: argparse.Namespace, overrides: list[str]) -> int:
    """Run ``engine tune`` with parsed flags; returns the exit status. Raises
    :class:`~engine.assembly.errors.AssemblyError`, which is wrong usage."""
    try:
        options = tune_options_of(flags)
        folder = options.sweep.folder_of(overrides, "tune")
        check_folder(folder, "--folder")
        file = options.preset or folder / "preset" / "mine.yaml"
        check_folder(file.parent, "--preset")
        if file.exists():
            check_writable(str(file), flag="--preset")
        base, grid = split(overrides, options.sweep.config_dirs)
        experiment = new_or_resumed(
            overrides, options.sweep, folder, lambda: tuned_sets(base, grid, options.sweep.config_dirs)
        )
    except ValueError as error:
        return complain("tune", error, USAGE)

    def saved() -> None:
        save(experiment, folder / RESULTS)

    print(f"baseline: {' '.join(base) or 'the defaults'}; grid: {' '.join(grid)}", file=sys.stderr)
    for line in refusals(experiment):
        print(line, file=sys.stderr)
    status, proof = OK, None
    try:
        with ends_cleanly(), status_line() as say:
            proof = asyncio.run(tune(experiment, options, saved, say))
    except ValueError as error:
        return complain("tune", error, USAGE)
    except (RuntimeError, OSError) as error:
        status = complain("tune", error, FAILED)
    except KeyboardInterrupt:
        status = complain("tune", f"interrupted; the same command goes on ({folder})", INTERRUPTED)
    experiment.summary = summarise_sweep(experiment, options.sweep) | {"proof": proof}
    report(experiment, folder)
    if status != OK or proof is None:
        return status or FAILED
    return named(experiment, proof, options, file)


async def tune(
    experiment: Experiment, options: TuneOptions, saved: Callable[[], None], say: Callable[[str], None]
) -> dict[str, Any]:
    """The sweep, unless it is over, and the proof of what it chose."""
    asked = next((one for one in experiment.rounds if one.kind == PROOF), None)
    if asked is None:
        await sweep(experiment, options.sweep, saved, say)
        chosen, why = choose(experiment, options.sweep.config_dirs, options.sweep.share)
        if chosen is None:
            return {"is_proven": False, "why": why}
        lines = lines_of(chosen, baseline_of(experiment), options.sweep.config_dirs)
        asked = proof_round(experiment, chosen, lines, options.sweep.config_dirs, options.budget_s)
        experiment.rounds.append(asked)
        saved()
    async with measuring(experiment, options.sweep) as measure:
        seed = options.sweep.load.seed
        race = Race(experiment, measure, BY, options.sweep.keep, options.budget_s, seed, saved, say)
        await race.make(asked)
        proof = prove(experiment, asked)
        if proof["is_proven"] and options.headroom:
            proof["headroom"] = await raise_load(experiment, proof, race.make)
    return proof


def named(experiment: Experiment, proof: dict[str, Any], options: TuneOptions, file: Path) -> int:
    """Write the preset, or say why there is none; returns the exit status."""
    console = Console()
    if not proof["is_proven"]:
        console.print(f"no set is named, and no preset written: {proof['why']}", style="bold", markup=False)
        return NONE
    lines = evidence(experiment, proof)
    chosen, baseline = experiment.candidates[proof["chosen"]], baseline_of(experiment)
    words = [*baseline.words, *lines_of(chosen, baseline, options.sweep.config_dirs)]
    comments = [
        f"By engine tune for {options.sweep.limits}, on {experiment.device}, {experiment.model}.",
        f"Load: {options.sweep.load}.",
        f"Baseline: {' '.join(baseline.words) or 'the defaults'}.",
        *lines,
    ]
    try:
        write_preset(file, words, options.sweep.config_dirs, comments)
    except (OSError, ValueError) as error:
        return complain("tune", error, FAILED)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    load = f"engine serve --config-dir {file.parent.parent} +preset={file.stem}"
    kept = proof["kept"][chosen.name]["verdict"]
    console.print(f"named: {file} (SLO {kept}); {load}", style="bold", soft_wrap=True, highlight=False, markup=False)
    return OK
