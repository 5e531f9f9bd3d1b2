"""Several ranks in one process, a thread each, say what one rank says, but for near-ties.

Sums over ranks are rounded otherwise than one rank's: a token may differ where two were all but equally likely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from engine import LLM
from engine.service.offline import Completion
from tests.selection import few

COMMON = ("device=cpu", "threads=1", "model.max_len=1024", "exporter=[]", "scheduler.max_requests=8", "seed=3")
TOGETHER = ("parallelism=threads", "communicator=simulated")
LAYOUTS = {
    "tp=2": ("parallelism.tp=2",),
    "tp=3": ("parallelism.tp=3",),
    "pp=2": ("parallelism.pp=2",),
    "pp=3": ("parallelism.pp=3",),
    "tp=2 pp=2": ("parallelism.tp=2", "parallelism.pp=2"),
    "tp=4 dcp=2": ("parallelism.tp=4", "parallelism.dcp=2"),
    "pcp=2": ("parallelism.pcp=2", "parallelism.pcp_min_tokens=4"),
    "tp=2 pcp=3": ("parallelism.tp=2", "parallelism.pcp=3", "parallelism.pcp_min_tokens=4"),
    "pp=2 pcp=2": ("parallelism.pp=2", "parallelism.pcp=2", "parallelism.pcp_min_tokens=4"),
}
SETS = {
    "overlap": (),
    "no overlap": ("overlap=false",),
    "small chunks": ("scheduler=chunked_prefill", "scheduler.token_budget=48"),
    "preempted": ("scheduler=continuous", "kv_allocator=paged", "memory.kv_tokens=400"),
    "ngram": ("drafter=ngram", "drafter.adaptive=false"),
    "eagle3": ("drafter=eagle3", "drafter.adaptive=false", "drafter.max_width=3"),
    "eager": ("execution=eager", "drafter=eagle3", "drafter.adaptive=false"),
}
QUICK = [
    ("tp=2", "overlap"), ("tp=2", "small chunks"), ("tp=2", "preempted"), ("tp=2", "eagle3"),
    ("pp=2", "overlap"), ("pp=2", "ngram"), ("pp=2", "eagle3"), ("pp=2", "preempted"), ("tp=2 pp=2", "overlap"),
    ("tp=4 dcp=2", "small chunks"), ("tp=4 dcp=2", "ngram"), ("pcp=2", "small chunks"), ("pcp=2", "eagle3"),
    ("tp=2 pcp=3", "ngram"), ("pp=2 pcp=2", "overlap"),
]  # fmt: skip
SLOW = [pair for pair in product(LAYOUTS, SETS) if pair not in QUICK]
PAIRS = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
TIE = 1e-3
"""Nats between two tokens that are all but equally likely."""

TEXTS = ("What does json.dumps do?", "The unittest module provides " * 12, "x")
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 2},
)


def outputs(llm: LLM, *asked: dict[str, Any]) -> list[list[Completion]]:
    """The first is asked twice, so that the second time prefixes are cached."""
    asked = asked or ASKED
    return [llm.generate(TEXTS, max_tokens=8, ignore_eos=True, **each) for each in (*asked, asked[0])]


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str], list[list[Completion]]]]:
    """What one rank says, by set."""
    known: dict[str, list[list[Completion]]] = {}

    def get(name: str) -> list[list[Completion]]:
        if name not in known:
            llm = LLM("bundled", overrides=[*COMMON, *SETS[name]])
            known[name] = outputs(llm)
            llm.close()
        return known[name]

    yield get


@few(1)
@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_several_ranks_say_what_one_rank_says(layout: str, name: str, alone: Any) -> None:
    expected = alone(name)
    llm = LLM("bundled", overrides=[*COMMON, *SETS[name], *TOGETHER, *LAYOUTS[layout]])
    try:
        found = outputs(llm)
        llm.core.check_idle()
    finally:
        llm.close()
    for ours, theirs in zip(found, expected, strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            assert_same_but_for_ties(mine, reference)


def assert_same_but_for_ties(mine: Completion, reference: Completion) -> None:
    pairs = zip(mine.tokens, reference.tokens, strict=True)
    at = next((i for i, (own, other) in enumerate(pairs) if own != other), None)
    upto = len(mine.tokens) if at is None else at
    for own, other in zip(mine.logprobs[:upto], reference.logprobs[:upto], strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=TIE)
    for own, other in zip(mine.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True):
        assert own is not None and other is not None and own.logprob == pytest.approx(other.logprob, abs=TIE)
    if at is not None:
        best = reference.logprobs[at].top
        assert abs(best[0][1] - best[1][1]) < TIE, (at, best)
