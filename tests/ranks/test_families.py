"""Of every family, ranks that are processes say what ranks in one process say, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tools.benchmarks.families import TESTS, suites

from engine.assembly.errors import AssemblyError
from engine.startup.memory.budget import DoesNotFit
from engine.testing.architecture import ArchitectureConformance
from tests.ranks.answers import Said, answers, plan_of

LAYOUTS = {
    "tp 2": ("parallelism.tp=2",),
    "ep 2": ("parallelism.tp=2", "parallelism.ep=2"),
    "pp 2": ("parallelism.pp=2",),
}
TOGETHER = ("parallelism=threads", "communicator=simulated")
APART = ("parallelism=local", "communicator=shm")


ALWAYS = ("Cohere2ForCausalLM", "pp 2")
"""Its first stage has no layer of one of the KV groups."""


def cases() -> Iterator[Any]:
    """The first model of each family."""
    for suite in suites(sorted(TESTS.glob("test_*.py"))):
        for family, names in groupby(suite.models(), key=lambda name: suite.config(name).architecture):
            name = next(names)
            for layout in LAYOUTS:
                marks = () if (family, layout) == ALWAYS else (pytest.mark.slow,)
                yield pytest.param(suite, name, layout, id=f"{family}-{layout}", marks=marks)


@pytest.mark.parametrize(("suite", "name", "layout"), list(cases()))
def test_processes_of_every_family_say_what_threads_say(suite: ArchitectureConformance, name: str, layout: str) -> None:
    """Where a model cannot be shared out so, both are refused."""
    with suite.checkpoint(name) as (model, _, _):
        together, apart = (said(model.path, (*where, *LAYOUTS[layout])) for where in (TOGETHER, APART))
    assert together == apart


def said(path: str | Path, ranks: tuple[str, ...]) -> Said | str:
    """What is answered, or why nothing is."""
    try:
        return answers(plan_of(path, "model.max_len=128", *ranks))
    except (AssemblyError, DoesNotFit) as error:
        return str(error)
