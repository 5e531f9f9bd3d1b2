"""An output that thinks before it answers: the grammar of the answer begins where the thought ends, which may have a
budget."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from engine.contracts.constraint import Matcher
from engine.contracts.request import ReasoningTokens

BEFORE, ANSWER = -1, -2
"""Stages of an output: it may begin to think; it answers. From 0 on: it thinks, and has thought so many tokens."""


class ReasoningMatcher:
    """A :class:`~engine.contracts.constraint.Matcher` of a thought and what follows."""

    def __init__(self, tokens: ReasoningTokens, answer: Matcher | None) -> None:
        """``answer``: of what follows; ``None``: anything may."""
        self._tokens = tokens
        self._answer = answer
        self._stages = [0 if tokens.opens is None else BEFORE]
        """At the beginning, and after each token."""

    def advance(self, token: int) -> bool:
        stage, tokens = self._stages[-1], self._tokens
        if stage == BEFORE and token == tokens.opens:
            self._stages.append(0)
        elif stage >= 0:
            if self._is_spent and token != tokens.closes:
                return False
            self._stages.append(ANSWER if token == tokens.closes else stage + 1)
        elif self._answer is None or self._answer.advance(token):
            self._stages.append(ANSWER)
        else:
            return False
        return True

    def roll_back(self, count: int) -> None:
        if count == 0:
            return
        stages = self._stages[-count - 1 :]
        del self._stages[-count:]
        answered = sum(before < 0 and after == ANSWER for before, after in pairwise(stages))
        if answered and self._answer is not None:
            self._answer.roll_back(answered)

    def fill(self, mask: Tensor) -> None:
        stage, tokens = self._stages[-1], self._tokens
        if self._is_spent:
            mask.zero_()
            _allow(mask, tokens.closes)
        elif stage >= 0 or self._answer is None:
            mask.fill_(-1)
        else:
            self._answer.fill(mask)
            if stage == BEFORE and tokens.opens is not None:
                _allow(mask, tokens.opens)

    def copy(self) -> Matcher:
        other = ReasoningMatcher(self._tokens, None if self._answer is None else self._answer.copy())
        other._stages = [*self._stages]
        return other

    @property
    def _is_spent(self) -> bool:
        """Nothing but the end of the thought may come."""
        budget = self._tokens.budget
        return budget is not None and self._stages[-1] >= budget


def _allow(mask: Tensor, token: int) -> None:
    bit = 1 << token % 32
    mask[token // 32] |= bit - (1 << 32) if bit >> 31 else bit
