"""Entry of ``engine plan``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.plan.device import HERE, listed
from engine_lab.plan.live import Observed, observed, score, served_plan
from engine_lab.plan.planning import Answer, Planner, Question
from engine_lab.plan.report import document, render
from engine_lab.plan.workload import DEFAULT, parse_workload
from engine_lab.shared.errors import complain
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
        if flags.live is not None:
            seen = asyncio.run(observed(flags.live, flags.api_key, flags.engine))
            question = live_question(question_of(flags, overrides), flags, seen)
            return score(flags, Planner(question, _say).brief(), seen)
        answer = Planner(question_of(flags, overrides), _say).answer()
    except LiveError as error:
        return complain("plan", error, FAILED)
    except ValueError as error:
        return complain("plan", error, USAGE)
    show(answer, flags.json)
    return OK if answer.sizing.blocks else FAILED


def question_of(flags: argparse.Namespace, overrides: Sequence[str]) -> Question:
    """Raises ``ValueError`` for flags that name nothing."""
    words = with_model(overrides, flags.model)
    if flags.trace is not None:
        load, trace = None, read_trace(Path(flags.trace), limit=flags.requests)
    else:
        load = flags.workload or parse_workload(DEFAULT)
        trace = load.requests(flags.requests, flags.seed)
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


def live_question(question: Question, flags: argparse.Namespace, seen: Observed) -> Question:
    """What is not given is as the server has it: its plan, and its latest requests."""
    question = replace(question, step_cost=seen.step_cost)
    if not question.overrides:
        question = replace(question, served=served_plan(seen))
    if flags.workload is None and flags.trace is None and len(seen.requests) > 1:
        _say(f"the load is that of the {len(seen.requests)} latest requests")
        question = replace(question, load=None, trace=tuple(seen.requests), load_is_served=True)
    return question


def _say(text: str) -> None:
    print(f"engine plan: {text}", file=sys.stderr, flush=True)


def show(answer: Answer, as_json: bool) -> None:
    """Print the page."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document(answer)), indent=1).decode() + "\n")
    else:
        Console().print(render(answer))
