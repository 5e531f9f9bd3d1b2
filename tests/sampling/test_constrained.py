"""Masks of logits on a CPU, and compiled grammars that are kept. What matchers follow is among the laws."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.contracts.constraint import Grammar, GrammarError
from engine.sampling.constrained import Grammars, MatchedRow, TokenMasks
from tests.native import needs_compiler


@pytest.mark.parametrize("by_native_code", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1025])
def test_forbidden_tokens_are_masked_in_their_rows_alone(vocab: int, by_native_code: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32, generator=generator)
    rows = torch.tensor([4, 0, 2])
    want = logits.clone()
    for row, mask in zip(rows.tolist(), words.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> (token % 32) & 1:
                want[row, token] = -math.inf
    TokenMasks(rows, words, {}, by_native_code).apply_(logits)
    assert torch.equal(logits, want)


class Counting:
    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Place:
        self.compiled.append(grammar.text)
        if grammar.text == "wrong":
            raise GrammarError("wrong")
        return Place()


class Place:
    def __init__(self) -> None:
        self.taken = 0

    def advance(self, token: int) -> bool:
        self.taken += 1
        return True

    def roll_back(self, count: int) -> None:
        self.taken -= count

    def fill(self, mask: Tensor) -> None:
        mask.fill_(-1)

    def forced(self) -> Sequence[int]:
        return ()


def test_every_output_has_a_matcher_that_was_compiled_for_it() -> None:
    constraint = Counting()
    grammars = Grammars(constraint, 8)
    for _ in range(2):
        grammars.prepare(Grammar("regex", "a"))
    first, second, third = (grammars.matcher(Grammar("regex", "a")) for _ in range(3))
    assert constraint.compiled == ["a"] * 3 and len({id(each) for each in (first, second, third)}) == 3
    grammars.prepare(Grammar("regex", "a"))
    grammars.matcher(Grammar("lark", "a"))
    assert constraint.compiled == ["a"] * 5, "another kind is another grammar"


def test_matchers_of_outputs_that_never_begin_are_let_go() -> None:
    constraint = Counting()
    grammars = Grammars(constraint, 2)
    for text in ("a", "b", "c"):
        grammars.prepare(Grammar("regex", text))
    grammars.matcher(Grammar("regex", "a"))
    assert constraint.compiled == ["a", "b", "c", "a"]
    grammars.matcher(Grammar("regex", "b"))
    assert constraint.compiled == ["a", "b", "c", "a"]


def test_outputs_that_take_two_matchers_keep_as_many_ready() -> None:
    constraint = Counting()
    grammars = Grammars(constraint, 2, per_output=2)
    for text in ("a", "b"):
        grammars.prepare(Grammar("regex", text))
    for text in ("a", "a", "b", "b"):
        grammars.matcher(Grammar("regex", text))
    assert constraint.compiled == ["a", "a", "b", "b"], "none had to be compiled again"


def test_a_wrong_grammar_is_not_kept() -> None:
    grammars = Grammars(Counting(), 2)
    for ask in (grammars.prepare, grammars.matcher, grammars.prepare):
        with pytest.raises(GrammarError):
            ask(Grammar("regex", "wrong"))


class Slow(Place):
    """Each mask takes a while of a processor."""

    def fill(self, mask: Tensor) -> None:
        ends = time.thread_time() + 0.02
        while time.thread_time() < ends:
            pass
        super().fill(mask)


def test_a_request_whose_masks_take_too_long_ends() -> None:
    words = torch.zeros(1, 1, dtype=torch.int32)
    slow, quick = MatchedRow(0, Slow(), mask_s=0.001, spare_s=0.1), MatchedRow(0, Place(), mask_s=0.001, spare_s=0.1)
    for _ in range(8):
        slow.fill((), words)
        quick.fill((), words)
    assert "takes too long (constraint.mask_ms=1)" in slow.error and not quick.error
    burst = MatchedRow(0, Slow(), mask_s=0.001, spare_s=0.1)
    for _ in range(3):  # what it may take beyond the mean
        burst.fill((), words)
    assert not burst.error
