"""An output that thinks before it answers: the grammar of the answer begins where the thought ends, which may have a
budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from engine.contracts.constraint import Matcher
from engine.contracts.request import ReasoningTokens

BEFORE, ANSWER = -1, -2
"""Stages of an output: it may begin to think; it answers. From 0 on: it thinks, and has thought so many tokens."""


class ReasoningMatcher:
    """A :class:`~engine.contracts.constraint.Matcher` of a thought and what follows."""

    def __init__(self, tokens: ReasoningTokens, answer: Matcher | None, stop_ids: Sequence[int] = ()) -> None:
        """``answer``: of what follows; ``None``: anything may. ``stop_ids``: tokens that end an output, which a thought
        before such an answer must not."""
        self._tokens = tokens
        self._answer = answer
        self._stop_ids = () if answer is None else tuple(stop_ids)
        self._stages = [0 if tokens.opens is None else BEFORE]
        """At the beginning, and after each token."""

    def advance(self, token: int) -> bool:
        stage, tokens = self._stages[-1], self._tokens
        if stage == BEFORE and token == tokens.opens:
            self._stages.append(0)
        elif stage >= 0:
            if token != tokens.closes and (self._is_spent or token in self._stop_ids):
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
        if stage >= 0:
            mask.fill_(0 if self._is_spent else -1)
            for token in self._stop_ids:
                if token // 32 < len(mask):  # a checkpoint may name end tokens that its vocabulary does not have
                    mask[token // 32] &= ~_bit(token)
            mask[tokens.closes // 32] |= _bit(tokens.closes)
        elif self._answer is None:
            mask.fill_(-1)
        else:
            self._answer.fill(mask)
            if stage == BEFORE and tokens.opens is not None:
                mask[tokens.opens // 32] |= _bit(tokens.opens)

    def forced(self) -> Sequence[int]:
        if self._stages[-1] == ANSWER and self._answer is not None:
            return self._answer.forced()
        return (self._tokens.closes,) if self._is_spent else ()

    @property
    def _is_spent(self) -> bool:
        """Nothing but the end of the thought may come."""
        budget = self._tokens.budget
        return budget is not None and self._stages[-1] >= budget


def _bit(token: int) -> int:
    """Of its word, as int32 has it."""
    bit = 1 << token % 32
    return bit - (1 << 32) if bit >> 31 else bit
