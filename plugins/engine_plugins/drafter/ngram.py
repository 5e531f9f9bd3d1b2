"""Prompt lookup: what followed the last time the same few tokens occurred in this request.

Costs no model and no memory traffic, and pays off wherever output repeats input: code edits, summaries, quotations,
structured text. (Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.config import DrafterConfig, at_least
from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.provider import BuildContext

_FINGERPRINT = 16
"""Latest tokens by which a history is recognised as a continuation of the one indexed before."""


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Prompt lookup: the last tokens are searched for earlier in the same request."""

    max_match: int = 4
    """Longest suffix, in tokens, that is looked up."""
    min_match: int = 2
    """Shortest suffix, in tokens, worth trusting."""
    window: int = 0
    """How many of the latest tokens are searched; 0: the whole request."""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        at_least("drafter.min_match", self.min_match, 1)
        at_least("drafter.max_match", self.max_match, self.min_match)
        at_least("drafter.window", self.window, 0)


class SuffixIndex:
    """Where every n-gram of one history last ended, for ``n`` in ``shortest .. longest``; grows with the history.

    The n-grams that end at the history's very end are left out until it grows: a suffix must not find itself.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(shortest, longest + 1)}
        self._indexed = 0
        self._last: tuple[int, ...] = ()
        self._first = -1

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` is what was indexed, possibly continued."""
        start = self._indexed - len(self._last)
        return self._indexed == 0 or (
            len(tokens) >= self._indexed
            and tokens[0] == self._first
            and tuple(tokens[start : self._indexed]) == self._last
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that are new. One pass per n over the new part, in C."""
        old, new = self._indexed, len(tokens)
        if new <= old:
            return
        for n, ends in self._ends.items():
            # N-grams ending at old .. new-1; a slice per shift makes zip yield them as tuples.
            first_end = max(old, n)
            part = tokens[first_end - n : new - 1]
            ends.update(zip(zip(*(part[i:] for i in range(n))), range(first_end, new)))
        self._indexed = new
        self._first = tokens[0]
        self._last = tuple(tokens[max(0, new - _FINGERPRINT) :])

    def find(self, tokens: Sequence[int], window: int) -> int | None:
        """Where the longest known suffix of ``tokens`` ended before (the index of the token that followed)."""
        oldest = len(tokens) - window if window else 0
        for n in reversed(self._ends):
            if n < len(tokens):
                end = self._ends[n].get(tuple(tokens[-n:]))
                if end is not None and end - n >= oldest:
                    return end
        return None


class NgramDrafter:
    """Host drafter over one :class:`SuffixIndex` per row."""

    placement: Literal["host", "device"] = "host"

    def __init__(self, config: NgramConfig, context: BuildContext) -> None:
        self.max_width = config.max_width
        self._config = config
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """What followed the longest suffix that occurred before; nothing for a row whose suffixes are all new."""
        return Draft(tokens=tuple(self._propose(row) for row in rows))

    def release(self, row_id: int) -> None:
        self._indexes.pop(row_id, None)

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        index = self._indexes.get(row.row_id)
        if index is None or not index.follows(row.tokens):
            index = SuffixIndex(self._config.min_match, self._config.max_match)
            self._indexes[row.row_id] = index
        index.extend(row.tokens)
        at = index.find(row.tokens, self._config.window)
        return () if at is None else _continuation(row.tokens, at, min(row.num_draft_tokens, self.max_width))


def _continuation(tokens: Sequence[int], at: int, num_draft_tokens: int) -> tuple[int, ...]:
    """Tokens from ``at`` on; past the end the copy reads what it has just written (a repeating text)."""
    copied = list(tokens[at : at + num_draft_tokens])
    period = len(copied)
    while len(copied) < num_draft_tokens:
        copied.append(copied[len(copied) - period])
    return tuple(copied)
