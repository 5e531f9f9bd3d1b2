"""A matcher of a thought and the answer after it, against a plain reading of the whole output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.contracts.request import ReasoningTokens
from engine.sampling.reasoning import ReasoningMatcher

VOCAB, OPENS, CLOSES, STOP = 70, 63, 31, 64


class Rising:
    """An answer whose tokens rise."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def advance(self, token: int) -> bool:
        if self.taken and token <= self.taken[-1]:
            return False
        self.taken.append(token)
        return True

    def roll_back(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def fill(self, mask: Tensor) -> None:
        allowed = range(self.taken[-1] + 1 if self.taken else 0, VOCAB)
        mask.copy_(torch.tensor(words(allowed), dtype=torch.int32))

    def forced(self) -> Sequence[int]:
        return () if not self.taken else (self.taken[-1] + 1,)


def words(allowed: Sequence[int] | range) -> list[int]:
    found = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(-(-VOCAB // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in found]


def allows(tokens: ReasoningTokens, has_answer: bool, output: Sequence[int], token: int) -> bool:
    """By definition, from the whole output so far."""
    thinks = tokens.opens is None or output[:1] == [tokens.opens] or (not output and token == tokens.opens)
    begun = len(output) > 0 or tokens.opens is None
    thought = output[tokens.opens is not None :] if thinks else []
    if thinks and not begun:
        return True
    if thinks and tokens.closes not in thought:
        ends = has_answer and token == STOP
        return token == tokens.closes or (not ends and (tokens.budget is None or len(thought) < tokens.budget))
    answer = thought[thought.index(tokens.closes) + 1 :] if thinks else output
    return not has_answer or not answer or token > answer[-1]


def allowed_by(matcher: ReasoningMatcher) -> set[int]:
    mask = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    matcher.fill(mask)
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> (token % 32) & 1}


@given(
    st.builds(
        ReasoningTokens,
        st.just(CLOSES),
        st.sampled_from([None, OPENS]),
        st.sampled_from([None, 0, 2]),
    ),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from([OPENS, CLOSES, 1, 2, 32, 64]), st.integers(0, 3)), max_size=10),
)
def test_it_allows_and_takes_what_the_definition_says_and_takes_it_back(
    tokens: ReasoningTokens, has_answer: bool, steps: list[tuple[int, int]]
) -> None:
    matcher = ReasoningMatcher(tokens, Rising() if has_answer else None, (STOP, 100 * VOCAB))
    output: list[int] = []
    for token, back in steps:
        want = {each for each in range(VOCAB) if allows(tokens, has_answer, output, each)}
        assert allowed_by(matcher) == want
        assert matcher.advance(token) == (token in want)
        output += [token] if token in want else []
        count = min(back, len(output))
        matcher.roll_back(count)
        del output[len(output) - count :]
