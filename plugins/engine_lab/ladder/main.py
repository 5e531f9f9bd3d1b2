"""Entry of ``engine ladder``: flags and overrides in; a table, a page and a file out."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench.probe import ProbeError
from engine_lab.ladder.analysis import summarise_ladder
from engine_lab.ladder.climb import climb
from engine_lab.ladder.options import LadderOptions, options_of
from engine_lab.ladder.page import page
from engine_lab.ladder.record import Ladder, load, save
from engine_lab.ladder.rungs import baseline
from engine_lab.ladder.screen import render
from engine_lab.shared.errors import complain
from engine_lab.shared.live import LiveError
from engine_lab.shared.output import check_writable
from engine_lab.shared.progress import status_line
from engine_lab.shared.servers import Refused
from engine_lab.shared.signals import ends_cleanly


def run(flags: argparse.Namespace, overrides: list[str]) -> int:
    """Run ``engine ladder`` with parsed flags; returns the exit status."""
    file = flags.json or flags.resume
    try:
        options = options_of(flags)
        ladder = new_or_resumed(options, overrides, flags.resume)
        for flag, path in (("--json", flags.json), ("--resume", flags.resume), ("--html", flags.html)):
            if path is not None:
                check_writable(path, flag=flag)
    except ValueError as error:
        return complain("ladder", error, USAGE)

    def saved() -> None:
        ladder.summary = summarise_ladder(ladder)
        if file is not None:
            save(ladder, file)

    status = OK
    try:
        with ends_cleanly(), status_line() as say:
            asyncio.run(climb(options, ladder, saved, say))
    except Refused as error:
        return complain("ladder", f"the engine of the baseline does not start:\n{error}", USAGE)
    except (ProbeError, LiveError, RuntimeError, OSError) as error:
        status = complain("ladder", error, FAILED)
    except ValueError as error:
        return complain("ladder", error, USAGE)
    except KeyboardInterrupt:
        further = f"continue with --resume {file}" if file else "nothing was saved: --json FILE saves every pair"
        status = complain("ladder", f"interrupted; {further}", INTERRUPTED)
    if not ladder.comparisons:
        refused = [f"\n{survey.rung}: {survey.refused}" for survey in ladder.surveys if survey.refused]
        if status != OK or not refused:
            return status
        return complain("ladder", f"the engine starts with none of the rungs:{''.join(refused)}", USAGE)
    saved()
    Console().print(render(ladder))
    if flags.html is not None:
        try:
            Path(flags.html).write_text(page(ladder), encoding="utf-8")
        except OSError as error:
            return complain("ladder", f"--html {flags.html}: {error.strerror}", FAILED)
    return status


def new_or_resumed(options: LadderOptions, overrides: list[str], path: str | None) -> Ladder:
    """Raises ``ValueError`` if a resumed ladder had other overrides, rungs or workload."""
    asked = Ladder(baseline(overrides), list(options.rungs), options.fixed())
    if path is None:
        return asked
    found = load(path)
    now = {"overrides": list(asked.base), "rungs": [(r.name, list(r.words)) for r in asked.rungs]} | asked.options
    then = {"overrides": list(found.base), "rungs": [(r.name, list(r.words)) for r in found.rungs]} | found.options
    if different := [key for key, value in now.items() if then.get(key) != value]:
        key = different[0]
        raise ValueError(
            f"--resume {path} was made with {key} {then.get(key)}, not {now[key]}: give the same, or start anew"
        )
    return found
