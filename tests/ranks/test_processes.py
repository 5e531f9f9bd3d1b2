"""Ranks that are processes say what ranks in one process say, bit for bit; and all ranks see the same logits."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import defaultdict

import pytest
from torch import Tensor

from engine import LLM
from engine.kernels.model import LoweredModel

from .test_tokens import ASKED, COMMON, LAYOUTS, SETS, TEXTS, TOGETHER, outputs

APART = ("parallelism=local", "communicator=shm")


SLOW = [("pp=2", "ngram"), ("pp=3", "eagle3"), ("tp=2 pp=2", "overlap")]
PAIRS = [("tp=2", "eagle3"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_processes_say_what_threads_say_to_the_bit(layout: str, name: str) -> None:
    found = []
    for where in (TOGETHER, APART):
        llm = LLM("bundled", overrides=[*COMMON, *SETS[name], *where, *LAYOUTS[layout]])
        try:
            found.append(
                [[(one.tokens, one.logprobs, one.prompt_logprobs) for one in each] for each in outputs(llm, ASKED[1])]
            )
            ranks, pid = llm.info.ranks, os.getpid()
        finally:
            llm.close()
        assert [rank.rank for rank in ranks] == list(range(len(ranks)))
        assert (len({rank.place for rank in ranks}) == len(ranks)) and ranks[0].place == f"pid {pid}"
    assert found[0] == found[1]


def test_all_ranks_of_a_stage_see_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = defaultdict(list)
    head = LoweredModel.head

    def hashed(model: LoweredModel, hidden: Tensor) -> Tensor:
        logits = head(model, hidden)
        seen[threading.current_thread().name].append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
        return logits

    monkeypatch.setattr(LoweredModel, "head", hashed)
    llm = LLM("bundled", overrides=[*COMMON, "drafter=ngram", *TOGETHER, "parallelism.tp=3"])
    llm.generate(TEXTS, max_tokens=24, ignore_eos=True, **ASKED[1])
    llm.close()
    first, *others = seen.values()
    assert len(others) == 2 and len(first) > 20 and all(each == first for each in others)
