"""What engines of one rank and of several answer to the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.startup.build import Engine, build_engine

TIE = 1e-3
"""Nats between two tokens that are all but equally likely."""
TOKENS = [(7 * i + i * i // 5) % 90 + 3 for i in range(61)]


def plan_of(folder: object, *overrides: str) -> Any:
    common = ("device=cpu", "threads=1", "exporter=[]", "model.dtype=float32", "scheduler.max_requests=4", "seed=3")
    return assemble([f"model.path={folder}", *common, "kv_allocator.block_size=8", *overrides])


Said = dict[str, tuple[list[int], list[Any]]]
"""By request: tokens, and the logprobs of each."""


def answers(plan: Any, preempted: bool = False) -> Said:
    """``preempted``: requests must have been, which longer answers bring about."""
    engine = build_engine(plan)
    try:
        found, preemptions = Said(), 0
        for again in ("", " again"):
            preemptions += asked(engine, again, found, 24 if preempted else 12)
            engine.core.check_idle()
        assert bool(preemptions) == preempted
        return found
    finally:
        engine.core.close()


def asked(engine: Engine, suffix: str, found: Said, max_tokens: int) -> int:
    """How often requests were preempted."""
    preemptions = 0
    for i, length in enumerate((5, 21, 37, 12, 77, 40)):
        tokens = tuple(TOKENS[j % 11 + i] for j in range(length))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=2)
        engine.core.submit(EngineRequest(f"{i}{suffix}", tokens, sampling))
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            assert not out.error, out.error
            tokens, logprobs = found.setdefault(out.request_id, ([], []))
            tokens.extend(out.tokens)
            logprobs.extend(out.logprobs or ())
            preemptions += out.timings.preemptions if out.timings is not None else 0
    return preemptions


def assert_same_but_for_ties(ours: Said, theirs: Said) -> None:
    assert ours.keys() == theirs.keys()
    for request, (tokens, logprobs) in ours.items():
        expected, known = theirs[request]
        at = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1), None)
        for mine, other in zip(logprobs[:at], known[:at], strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=TIE)
        if at is not None:
            best: Sequence[tuple[int, float]] = known[at].top
            assert abs(best[0][1] - best[1][1]) < TIE, (request, at, best)
