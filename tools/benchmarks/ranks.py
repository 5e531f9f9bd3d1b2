"""Several ranks beside one, in float32 on this CPU.

    python -m tools.benchmarks.ranks [--kernels torch] [--all] [tests/plugins/architecture/test_llama.py ...]

Prints a row of Markdown for each family, of the first of its models in the conformance suites (``--all``: the largest
numbers of all of them). Each rank is a thread; sums are added in the order of ranks. Two sequences are computed
together, in chunks and then token by token, so that prompts and decode steps are both there.

tp 2 ...: the largest difference of logits from those of one rank, as a share of the largest logit; ``-`` where the
model cannot be shared out so, or has no experts.
changed: positions, of all that were compared, at which another token is the most likely one.
margin: by how much the most likely token of one rank was ahead there, at most, as a share of the largest logit.
closest: by how much the most likely token is ahead of the second at least, at any position, likewise.
bits: whether all ranks of a layout have the same bits of logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

import torch
from tools.benchmarks.families import PIECE, TESTS, suites

from engine.contracts.config import CommunicatorConfig
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Experts
from engine.kernels.settings import Kernels
from engine.models.layout import Layout
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context
from engine.testing.paged_loop import PagedLoop, loaded
from engine.testing.ranks import Difference, Ranks, compare, logits, steps_of
from engine_plugins.communicator.simulated import SimulatedCommunicator

LAYOUTS: Mapping[str, Layout] = {
    "tp 2": Layout(2),
    "tp 3": Layout(3),
    "tp 4": Layout(4),
    "pp 2": Layout(1, 2),
    "pp 3": Layout(1, 3),
    "tp 2 x pp 2": Layout(2, 2),
    "ep 2": Layout(2, 1, 2),
    "tp 4 x ep 2": Layout(4, 1, 2),
}
CHUNKS, OUTPUT = (13, 1, 6), 6
"""Tokens of the first steps, and greedy tokens after them."""


def communicator() -> SimulatedCommunicator:
    return SimulatedCommunicator(CommunicatorConfig(), build_context())


def differences(
    model: ModelFacts, graph: Graph, layouts: Mapping[str, Layout] = LAYOUTS, kernels: Kernels = "torch"
) -> dict[str, Difference | str]:
    """By layout; for one that is not possible, why. The texts are greedy ones of one rank, so that tokens of ranks
    that differ nowhere are those that ranks would choose."""
    alone = PagedLoop(loaded(model, graph, kernels))
    prompts = [[token % model.vocab_size for token in PIECE * 2], [token % model.vocab_size for token in PIECE[2:]]]
    texts = [prompt + alone.greedy(prompt, OUTPUT) for prompt in prompts]
    steps = steps_of(texts, CHUNKS)
    want = logits(alone, steps)
    found: dict[str, Difference | str] = {}
    has_experts = any(isinstance(node.op, Experts) for node in graph.nodes)
    for name, layout in layouts.items():
        if layout.ep > 1 and not has_experts:
            continue
        try:
            with Ranks(model, graph, layout, communicator, kernels=kernels) as ranks:
                found[name] = compare(want, ranks.logits(steps))
        except ValueError as error:
            found[name] = str(error)
    return found


def row(suite: ArchitectureConformance, names: Sequence[str], kernels: Kernels) -> str:
    """Of one family: the largest numbers of some of its models."""
    measured: dict[str, list[Difference]] = {name: [] for name in LAYOUTS}
    for name in names:
        with suite.checkpoint(name) as (model, graph, _):
            for layout, found in differences(model, graph, LAYOUTS, kernels).items():
                if isinstance(found, Difference):
                    measured[layout].append(found)
    every = [one for of_layout in measured.values() for one in of_layout]
    shares = [f"{max(one.drift for one in found):.0e}" if found else "-" for found in measured.values()]
    cells = (
        suite.config(names[0]).architecture, *shares, str(sum(one.changed for one in every)),
        f"{max(one.margin for one in every):.0e}", f"{min(one.closest for one in every):.0e}",
        "same" if all(one.is_one for one in every) else "DIFFER",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


COLUMNS = ("architecture", *LAYOUTS, "changed", "margin", "closest", "bits")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="test files with conformance suites")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="torch")
    parser.add_argument("--all", action="store_true", help="all models of each family")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for suite in suites(given.files or sorted(TESTS.glob("test_*.py"))):
        for _, group in groupby(suite.models(), key=lambda name: suite.config(name).architecture):
            names = list(group)
            print(row(suite, names if given.all else names[:1], given.kernels), flush=True)


if __name__ == "__main__":
    main()
