"""What the grammar of an output forces to come next: drafts that cost no model and are seldom rejected.
``drafting.py`` asks, where the drafter is on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contracts.constraint import GrammarError, Matcher
from engine.contracts.request import SamplingParams

MatcherOf = Callable[[SamplingParams, Sequence[int]], Matcher | None]
"""``(sampling, stop_ids)``: a matcher at the beginning of an output; ``None``: anything may come."""
MOST_S = 0.02
"""CPU time of one question; a grammar that takes longer is not asked again. Once the questions of a step have taken so
long the other requests of that step are not asked about."""


@dataclass(slots=True)
class Forcing:
    """A matcher that follows the tokens that the host knows, beside the one that makes masks."""

    matcher: Matcher | None
    num_taken: int = 0

    def after(self, tokens: Sequence[int], prompt_len: int) -> Sequence[int]:
        """What comes after all of an output's tokens. Empty where nothing is certain, and for good once the matcher has
        reached its limits or takes a token no more: where the one that makes the masks does, too, it says why."""
        if self.matcher is None:
            return ()
        begun_s, matcher = time.thread_time(), self.matcher
        try:
            follows = all(matcher.advance(token) for token in tokens[prompt_len + self.num_taken :])
            found = matcher.forced() if follows else ()
        except GrammarError:
            follows, found = False, ()
        self.num_taken = len(tokens) - prompt_len
        if not follows or time.thread_time() - begun_s > MOST_S:
            self.matcher = None
        return found
