"""Entry of ``engine plan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.plan.device import HERE, listed
from engine_lab.plan.live import score
from engine_lab.plan.planning import Answer, Planner, Question
from engine_lab.plan.report import document, render
from engine_lab.shared.flags import with_model
from engine_lab.shared.live import LiveError
from engine_lab.shared.output import check_writable
from engine_lab.shared.simulation.traces.reading import read_trace


def run(flags: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run ``engine plan`` with parsed flags; returns the exit status."""
    try:
        if flags.baseline is not None and flags.live is None:
            raise ValueError(f"--baseline {flags.baseline}: it is for --live URL")
        if flags.engine is not None and flags.live is None:
            raise ValueError(f"--engine {flags.engine}: it is for --live URL")
        if flags.baseline is not None:
            check_writable(flags.baseline, flag="--baseline")
        planner = Planner(question_of(flags, overrides), _say)
        if flags.live is not None:
            return score(flags, planner.brief())
        answer = planner.answer()
    except LiveError as error:
        print(f"engine plan: {error}", file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(f"engine plan: {error}", file=sys.stderr)
        return USAGE
    show(answer, flags.json)
    return OK if answer.sizing.blocks else FAILED


def question_of(flags: argparse.Namespace, overrides: Sequence[str]) -> Question:
    """Raises ``ValueError`` for flags that name nothing."""
    words = with_model(overrides, flags.model)
    if flags.trace is not None:
        load, trace = None, read_trace(Path(flags.trace), limit=flags.requests)
    else:
        load, trace = flags.workload, flags.workload.requests(flags.requests, flags.seed)
    return Question(
        tuple(words),
        tuple(flags.config_dir),
        None if flags.device == HERE else listed(flags.device),
        None if flags.calibration is None else Path(flags.calibration),
        tuple(trace),
        load,
        flags.slo,
        flags.price,
        flags.seed,
        flags.thorough,
    )


def _say(text: str) -> None:
    print(f"engine plan: {text}", file=sys.stderr, flush=True)


def show(answer: Answer, as_json: bool) -> None:
    """Print the page."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document(answer)), indent=1).decode() + "\n")
    else:
        Console().print(render(answer))
