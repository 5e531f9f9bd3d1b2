"""Families of models beside transformers, in float32 on this CPU.

    python tools/benchmarks/families.py tests/plugins/architecture/test_llama.py ...

Prints a row of Markdown for each family. Its models are those of the conformance suites in the given files (all of
``tests/plugins/architecture`` by default): tiny ones, one for each thing in which models of the family differ, written
by transformers with random weights, norms and biases included. Everything but the model is as the plan has it by
default: prefix cache, chunked prefill, C++ kernels where there is a compiler.

logits: the largest difference from transformers, as a share of the largest logit; of a whole prompt, and in chunks of 7
tokens.
greedy: models of which 32 tokens are those of transformers; the prompt in chunks of at most 16 tokens.
cached: the same, after a prompt whose beginning comes from the prefix cache.
ngram, early_exit: the same, verifying drafts of a drafter that drafts in every step.
int8: the error of logits with weights rounded to 8 bits: root mean square, as a share of that of the logits.
lines: of the file that describes the family.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.plan import EnginePlan
from engine.contracts.request import EngineRequest, SamplingParams, Timings
from engine.startup.build import build_engine
from engine.testing.architecture import ArchitectureConformance
from engine_lab.eval.forward import LoadedPlan

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "plugins" / "architecture"
COMMON = (
    "device=cpu", "threads=1", "model.dtype=float32", "exporter=[]", "kv_allocator.block_size=8",
    "scheduler.token_budget=16", "scheduler.max_requests=2",
)  # fmt: skip
DRAFTERS = {
    "ngram": ("drafter=ngram", "drafter.min_match=1", "drafter.adaptive=false"),
    "early_exit": ("drafter=early_exit", "drafter.layers=1", "drafter.adaptive=false"),
}
OUTPUT, CHUNK = 32, 7
PIECE = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38)
PROMPT = PIECE * 3
"""It repeats itself, so that a drafter has something to look up."""


@dataclass(slots=True)
class Row:
    """What was measured of one family."""

    family: str
    """First entry of ``architectures``."""
    file: str
    lines: int
    """Of the file."""
    models: int = 0
    differences: list[float] = field(default_factory=list)
    in_chunks: list[float] = field(default_factory=list)
    equal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("greedy", "cached", *DRAFTERS), 0))
    """By column, models whose tokens are those of transformers."""
    rounded: list[float] = field(default_factory=list)
    weights_bytes: int = 0
    planned_bytes: int = 0
    """Of the weights of all models, as loaded and as planned before."""

    def __str__(self) -> str:
        shares = (f"{max(found):.1e}" for found in (self.differences, self.in_chunks))
        counts = (f"{count}/{self.models}" for count in self.equal.values())
        cells = (self.family, *shares, *counts, f"{max(self.rounded):.1%}", f"{self.file}, {self.lines}")
        return f"| {' | '.join(cells)} |"


COLUMNS = ("architecture", "logits", "in chunks", "greedy", "cached", *DRAFTERS, "int8", "file, lines")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def measure(row: Row, suite: ArchitectureConformance, name: str) -> None:
    """Add what one model of a suite gives."""
    with suite.checkpoint(name) as (model, _, theirs):
        path, prompt = f"model.path={model.path}", tuple(token % model.vocab_size for token in PROMPT)
        row.models += 1
        want = logits_of(theirs, prompt)
        row.differences.append(difference(planned_logits(prompt, len(prompt), path), want))
        row.in_chunks.append(difference(planned_logits(prompt, CHUNK, path), want))
        rounded = planned_logits(prompt, len(prompt), path, "quantizer=int8")
        row.rounded.append(rounding_of(rounded, want))
        plain = build_engine(plan_of(path))
        assert plain.info.ledger is not None
        weights = next(line for line in plain.info.ledger.lines if line.name == "weights")
        row.weights_bytes += weights.measured_bytes or 0
        row.planned_bytes += weights.planned_bytes
        for (column, cached), answer in answers(plain.core, prompt, path):
            assert (answer.timings.cached_tokens > 0) == cached, f"{name}: {answer.timings.cached_tokens} cached tokens"
            assert (answer.timings.drafted_tokens > 0) == (column in DRAFTERS), f"{name}: {column} drafted nothing"
            row.equal["cached" if cached else column] += answer.tokens == greedy(theirs, prompt, answer.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """To a request."""

    tokens: tuple[int, ...]
    timings: Timings


def answers(plain: Any, prompt: Sequence[int], *overrides: str) -> Iterator[tuple[tuple[str, bool], Answer]]:
    """Of an engine without drafts and of one with each drafter; the first one's second answer, marked, is after a
    cached prompt."""
    yield ("greedy", False), answer(plain, prompt)
    yield ("greedy", True), answer(plain, prompt)
    for drafter, chosen in DRAFTERS.items():
        yield (drafter, False), answer(build_engine(plan_of(*overrides, *chosen)).core, prompt)


def answer(core: Any, prompt: Sequence[int]) -> Answer:
    core.submit(EngineRequest("a", tuple(prompt), SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)))
    tokens, timings = [], Timings()
    while core.has_work:
        for out in core.step().outputs:
            assert out.finish_reason != "error", out.error
            tokens += out.tokens
            timings = out.timings or timings
    return Answer(tuple(tokens), timings)


@cache
def plan_of(*overrides: str) -> EnginePlan:
    return assemble([*COMMON, *overrides])


def planned_logits(tokens: Sequence[int], chunk: int, *overrides: str) -> Tensor:
    """Of each token, as the plan computes it, so many tokens at a time."""
    plan = plan_of(*overrides)
    loaded = LoadedPlan(plan, bind(plan), len(tokens), chunk)
    return torch.cat(list(loaded.logits(loaded.hidden(tuple(tokens)))))


@torch.no_grad()
def logits_of(theirs: Any, tokens: Sequence[int]) -> Tensor:
    """Of each token, by transformers."""
    logits: Tensor = theirs(torch.tensor([tokens])).logits[0]
    return logits


def greedy(theirs: Any, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
    """What transformers finds most likely after the prompt and after each token of ``output``."""
    likely = logits_of(theirs, [*prompt, *output]).argmax(dim=-1).tolist()
    return tuple(likely[len(prompt) - 1 : -1])


def rounding_of(got: Tensor, want: Tensor) -> float:
    """Root mean square of the error, as a share of that of ``want``."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def difference(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def suites(files: Sequence[Path]) -> Iterator[ArchitectureConformance]:
    """Those in some test files that compare with transformers."""
    for file in files:
        spec = importlib.util.spec_from_file_location(f"families_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, found in inspect.getmembers(module, inspect.isclass):
            if name.startswith("Test") and issubclass(found, ArchitectureConformance):
                yield found()


def rows(suite: ArchitectureConformance) -> Iterator[Row]:
    """One for each family of a suite: first entries of ``architectures``."""
    file = inspect.getsourcefile(type(suite.make()))
    assert file is not None
    lines = len(Path(file).read_text().splitlines())
    for family, names in groupby(suite.models(), key=lambda name: suite.config(name).architecture):
        row = Row(family, Path(file).name, lines)
        for name in names:
            measure(row, suite, name)
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="test files with conformance suites")
    files = parser.parse_args(arguments).files or sorted(TESTS.glob("test_*.py"))
    sys.path.insert(0, str(ROOT))
    print(HEADER)
    for suite in suites(files):
        for row in rows(suite):
            print(row, flush=True)


if __name__ == "__main__":
    main()
