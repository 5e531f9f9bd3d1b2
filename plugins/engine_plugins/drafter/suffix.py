"""Lookup in everything written lately: this request's text and what other requests were answered.

After SuffixDecoding (Oliaro et al., arXiv:2411.04975): the longest suffix of a request's tokens that occurred before,
in the request itself or among the latest outputs of others, is continued as it was continued most often, and for only
as long as that is likely to be right. Suits agents, retries and templates, whose outputs resemble each other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from engine.contracts.config import DrafterConfig, at_least, between
from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.provider import BuildContext

OCCURRENCES = 16
"""Latest occurrences of a run that are looked at: bounds the work per token."""
LONG_RUN = 4
"""How many times as long as the shortest match the runs are that are looked up first."""
_END = -1
"""Follows every finished text."""


@dataclass(frozen=True)
class SuffixConfig(DrafterConfig):
    """The last tokens are searched for in the same request and in the latest outputs of others of its tenant."""

    max_width: int = 8
    min_match: int = 2
    """Shortest suffix, in tokens, worth trusting."""
    max_match: int = 32
    """Tokens from which on a match is as good as a longer one."""
    min_confidence: float = 0.3
    """A draft ends where the chance that all of it is right falls below this."""
    remembered_tokens: int = 131072
    """Output tokens of finished requests that are kept, of all tenants together; up to 300 bytes each. 0: none."""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        at_least("drafter.min_match", self.min_match, 1)
        at_least("drafter.max_match", self.max_match, self.min_match)
        between("drafter.min_confidence", self.min_confidence, 0.0, 1.0)
        at_least("drafter.remembered_tokens", self.remembered_tokens, 0)


class _Runs:
    """Where runs of ``length`` tokens occurred: chains of positions by the hash of the run, latest first, as in LZ77
    compressors. Position ``i`` stands for the tokens before token ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._latest: dict[int, int] = {}
        self._before = array("q")

    def extend(self, tokens: Sequence[int], start: int, old: int) -> None:
        """Take in ``tokens[old:]``. The runs of the text that begins at ``start`` count, if a token follows them."""
        first = max(old, start + self.length)
        self._before.extend([-1] * (len(tokens) - len(self._before)))
        part = tokens[first - self.length : len(tokens) - 1]
        latest, before = self._latest, self._before
        for position, key in enumerate(map(hash, zip(*(part[i:] for i in range(self.length)))), first):
            before[position] = latest.get(key, -1)
            latest[key] = position

    def chain(self, tail: Sequence[int]) -> Iterator[int]:
        """Positions after runs that have the hash of the last tokens of ``tail``."""
        if len(tail) >= self.length:
            position = self._latest.get(hash(tuple(tail[-self.length :])), -1)
            while position >= 0:
                yield position
                position = self._before[position]


class Texts:
    """Texts to look things up in. Adding a token takes constant time, and some 300 bytes at most."""

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self._start = 0
        """Of the text that still grows."""
        self._runs = (_Runs(LONG_RUN * shortest), _Runs(shortest))

    def append(self, tokens: Sequence[int]) -> None:
        """Continue the last text."""
        old = len(self.tokens)
        self.tokens.extend(tokens)
        for runs in self._runs:
            runs.extend(self.tokens, self._start, old)

    def close(self) -> None:
        """What comes next is another text."""
        self.tokens.append(_END)
        self._start = len(self.tokens)

    def matches(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """Where ``tail`` or an end of it occurred: (tokens that are equal, position after them), latest first.

        The latest :data:`OCCURRENCES` of the last ``LONG_RUN * shortest`` tokens; of the last ``shortest`` if those
        are new.
        """
        for runs in self._runs:
            chained = islice(runs.chain(tail), OCCURRENCES)
            found = [(self._equal(tail, position), position) for position in chained]
            found = [match for match in found if match[0] >= runs.length]
            if found:
                return found
        return []

    def _equal(self, tail: Sequence[int], position: int) -> int:
        """How many tokens before ``position`` are those at the end of ``tail``."""
        tokens, most = self.tokens, min(len(tail), position)
        if tokens[position - most : position] == tail[len(tail) - most :]:
            return most
        count = 0
        while tokens[position - 1 - count] == tail[-1 - count]:
            count += 1
        return count


class Memory:
    """The latest outputs, each tenant's apart; between half of ``capacity`` tokens and all of it, once there are as
    many. The older half is forgotten at once."""

    def __init__(self, capacity: int, shortest: int) -> None:
        self._half = capacity // 2
        self._shortest = shortest
        self._new: dict[str, Texts] = {}
        self._old: dict[str, Texts] = {}
        self._size = 0
        """Tokens in the newer half."""

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Remember an output; of one that is longer than half the capacity only the end."""
        output = output[max(0, len(output) - self._half) :]
        if not output:
            return
        if self._size + len(output) > self._half:
            self._old, self._new, self._size = self._new, {}, 0
        texts = self._new.setdefault(salt, Texts(self._shortest))
        texts.append(output)
        texts.close()
        self._size += len(output)

    def of(self, salt: str) -> list[Texts]:
        """What a tenant may look at, the latest first."""
        return [half[salt] for half in (self._new, self._old) if salt in half]


class _Request:
    """What is known of the request in a row."""

    def __init__(self, salt: str, prompt_len: int, shortest: int) -> None:
        self.salt = salt
        self.prompt_len = prompt_len
        self.texts = Texts(shortest)


class SuffixDrafter:
    """Host drafter over the texts of running requests and a :class:`Memory` of finished ones."""

    placement: Literal["host", "device"] = "host"

    def __init__(self, config: SuffixConfig, context: BuildContext) -> None:
        self.max_width = config.max_width
        self._config = config
        self._memory = Memory(config.remembered_tokens, config.min_match)
        self._requests: dict[int, _Request] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """The likely continuation of each row; nothing for a row whose last tokens are new."""
        return Draft(tokens=tuple(self._propose(row) for row in rows))

    def release(self, row_id: int) -> None:
        """What the request was answered, as far as it was seen, now serves others of its tenant."""
        request = self._requests.pop(row_id, None)
        if request is not None:
            self._memory.add(request.salt, request.texts.tokens[request.prompt_len :])

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        own = self._take_in(row).texts
        tail = own.tokens[-self._config.max_match :]
        searched = (own, *self._memory.of(row.salt))
        found = [(length, texts.tokens, at) for texts in searched for length, at in texts.matches(tail)]
        longest = max((length for length, _, _ in found), default=0)
        matches = [(tokens, at) for length, tokens, at in found if length == longest]
        return continued(matches, longest, min(row.num_draft_tokens, self.max_width), self._config.min_confidence)

    def _take_in(self, row: DraftRow) -> _Request:
        request = self._requests.get(row.row_id)
        if request is None:
            request = self._requests[row.row_id] = _Request(row.salt, row.prompt_len, self._config.min_match)
        request.texts.append(row.tokens[len(request.texts.tokens) :])
        return request


def continued(
    matches: list[tuple[list[int], int]], length: int, num_draft_tokens: int, min_confidence: float
) -> tuple[int, ...]:
    """At most ``num_draft_tokens`` tokens: step by step what most of the ``matches`` (text, position) say, the first
    of equals.

    ``length``: how many tokens before each match are those of the request. A token that ``c`` of ``n`` matches agree
    on is taken to be right with probability ``c / (n + 1/length)``: the longer the match, the less is left for
    something new. The draft ends before its probability falls below ``min_confidence``.
    """
    draft: list[int] = []
    confidence = 1.0
    while len(draft) < num_draft_tokens:
        # After the end of its own text, a match reads what has just been drafted (a repeating text).
        following = [text[at] if at < len(text) else draft[at - len(text)] for text, at in matches]
        votes = Counter(token for token in following if token != _END)
        if not votes:
            break
        best, agreeing = votes.most_common(1)[0]
        confidence *= agreeing / (votes.total() + 1.0 / (length + len(draft)))
        if confidence < min_confidence:
            break
        draft.append(best)
        matches = [(text, at + 1) for token, (text, at) in zip(following, matches, strict=True) if token == best]
    return tuple(draft)
