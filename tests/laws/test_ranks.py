"""Several ranks choose the tokens that one chooses: every family, however it is shared out. All ranks have the same
bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import pytest
from tools.benchmarks.families import TESTS, suites
from tools.benchmarks.ranks import LAYOUTS, differences

from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.kernels.settings import Kernels
from engine.testing.architecture import ArchitectureConformance
from engine.testing.ranks import Difference
from tests.needs import needs_compiler

DRIFT, TYPICAL = 1e-4, 3e-6
"""Largest difference of logits in float32 from those of one rank, as a share of the largest logit: of any token, and of
half of them. Sums are made in another order. A token of recurrent layers may be all but undecided: there, two sets of
kernels on one rank differ by as much."""
ALWAYS = ("tp 3", "tp 2 x pp 2", "ep 2")
"""Heads that are shared out unevenly and kept twice; both ways together; whole experts."""


def models() -> Iterator[Any]:
    """The first of each family; the others take their time."""
    for suite in suites(sorted(TESTS.glob("test_*.py"))):
        for family, names in groupby(suite.models(), key=lambda name: suite.config(name).architecture):
            for number, name in enumerate(names):
                marks = () if number == 0 else (pytest.mark.slow,)
                yield pytest.param(suite, name, id=name if number else family, marks=marks)


MODELS = list(models())


@pytest.fixture(scope="module")
def written() -> Iterator[Written]:
    """Checkpoints, by the names of their models."""
    with ExitStack() as folders:
        yield Written(folders)


class Written(dict[str, tuple[ModelFacts, Graph]]):
    def __init__(self, folders: ExitStack) -> None:
        super().__init__()
        self._folders = folders

    def of(self, suite: ArchitectureConformance, name: str) -> tuple[ModelFacts, Graph]:
        if name not in self:
            model, graph, _ = self._folders.enter_context(suite.checkpoint(name))
            self[name] = model, graph
        return self[name]


def check(found: dict[str, Difference | str]) -> None:
    assert found
    for layout, one in found.items():
        assert isinstance(one, Difference), f"{layout}: {one}"
        assert one.is_one, f"{layout}: ranks have different bits"
        assert one.drift <= DRIFT and one.typical <= TYPICAL and one.equal_but_for_ties, f"{layout}: {one}"


@pytest.mark.parametrize(("suite", "name"), MODELS)
def test_ranks_choose_the_tokens_of_one(suite: ArchitectureConformance, name: str, written: Written) -> None:
    check(differences(*written.of(suite, name), {layout: LAYOUTS[layout] for layout in ALWAYS}))


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "name"), MODELS)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_ranks_choose_the_tokens_of_one_in_every_layout(
    suite: ArchitectureConformance, name: str, kernels: Kernels, written: Written
) -> None:
    check(differences(*written.of(suite, name), LAYOUTS, kernels))
