"""Why a prompt was not found in the prefix cache: what set it apart from the most similar prompt before it.

The token ids of recent prompts are kept in this process, a bounded number of them, and never shown: an explanation
names positions and kinds.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_TOKENS = 1 << 20
"""Most tokens of all prompts that are kept."""
MAX_PROMPTS = 1024
LOOKED_AT = 64
"""Prompts that a new one is compared with before it is sent."""
SAME = 32
"""So many equal tokens in a row are the same text."""
NEAR = 64
"""A difference of at most so many tokens on either side, after which both prompts go on alike, is one inserted or
changed place."""
Kind = Literal["first", "whole", "evicted", "continues", "inserted", "order", "differs"]
"""``first``: no prompt came before it; ``whole``: all its whole blocks were cached; ``evicted``: what it shares was not
in the cache; ``continues``: it goes on where the other one ended; ``inserted``: a short text differs, and both go on
alike; ``order``: parts have changed places; ``differs``: anything else."""
_NUMBERS = re.compile(r"[\d\s:./,+\-TZ]*\d[\d\s:./,+\-TZ]*", re.ASCII)
_ID = re.compile(r"(?=.*\d)[\s0-9A-Fa-f_\-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: array[int]
    salt: str
    ends: Sequence[int]


class RecentPrompts:
    """The prompts of the sequences that came last, by sequence. Use from one thread."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def add(self, request_id: str, tokens: Sequence[int], salt: str, ends: Sequence[int] = ()) -> None:
        """``ends``: of the beginnings of it that are to stay cached, at breakpoints."""
        self._prompts[request_id] = _Prompt(array("I", tokens), salt, ends)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens or len(self._prompts) > MAX_PROMPTS:
            _, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)

    def shared(self, tokens: Sequence[int], salt: str) -> int:
        """Tokens from its beginning that a prompt shares with one of the last :data:`LOOKED_AT`."""
        mine = array("I", tokens)
        last = list(itertools.islice(reversed(self._prompts.values()), LOOKED_AT))
        return max((common(mine, prompt.tokens) for prompt in last if prompt.salt == salt), default=0)

    def explain(
        self, request_id: str, cached: int, block_size: int, decode: Callable[[Sequence[int]], str]
    ) -> dict[str, Any] | None:
        """Why no more than ``cached`` tokens of a prompt were found: ``kind`` is a :data:`Kind`, and ``why`` says it
        in words. Where both prompts have breakpoints, ``breakpoint`` is the last one's token, and ``breakpoint_shared``
        whether what both share reaches one of the other's. ``None`` for a prompt that is not kept."""
        mine = self._prompts.get(request_id)
        if mine is None:
            return None
        names = list(self._prompts)
        # Tenants share nothing, so neither may one learn what another's prompts have in common with its own.
        before = [name for name in names[: names.index(request_id)] if self._prompts[name].salt == mine.salt]
        if not before:
            return _because("first", "no prompt of the same cache_salt came before it")
        shared, nearest = max((common(mine.tokens, self._prompts[name].tokens), at) for at, name in enumerate(before))
        name = before[nearest]
        other = self._prompts[name]
        found: dict[str, Any] = {"nearest": name, "shared_tokens": shared, "first_difference": shared}
        if mine.ends and other.ends:
            found |= {"breakpoint": max(mine.ends), "breakpoint_shared": min(other.ends) <= shared}
        whole = min(shared, len(mine.tokens) - 1) // block_size * block_size
        if cached >= whole:
            if shared == len(mine.tokens):
                return found | _because("whole", _whole(cached, whole, len(mine.tokens), block_size))
            return found | _difference(mine.tokens, other.tokens, shared, decode)
        return found | _because("evicted", "what both share was not in the cache: not computed yet, or evicted")


def _because(kind: Kind, why: str) -> dict[str, Any]:
    return {"kind": kind, "why": why}


def _whole(cached: int, whole: int, length: int, block_size: int) -> str:
    """Of a prompt of ``length`` that another one begins with; ``whole``: tokens in its whole blocks."""
    if cached == length - 1:
        return "all of it was cached but its last token, which is always computed"
    if not whole:
        return f"it has no whole block of {block_size} tokens before its last token, which is always computed"
    return f"all its whole blocks were cached: {whole} tokens; the rest is always computed"


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens from the beginning that two prompts share."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _difference(mine: array[int], other: array[int], at: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Of two prompts that part at a token."""
    if at == len(other):
        return _because("continues", "it goes on where the other prompt ended")
    if (meeting := _meet_again(mine, other, at)) is not None:
        changed = decode(mine[at : at + meeting]) or decode(other[at : at + meeting])
        same = common(mine[at + meeting :], other[at + meeting :]) if meeting else 0
        why = f"{_sort(changed)} differs at token {at}; after it both go on alike: put it at the end{_lost(same)}"
        return _because("inserted", why)
    place = _find(other, mine[at : at + SAME])
    if place is not None and len(mine) - at >= SAME:
        where = f"what begins at token {at} stands at token {place} of the other prompt"
        return _because("order", f"order: {where}; keep one order")
    return _because("differs", f"its content differs from token {at} on")


def _lost(same: int) -> str:
    return f" (at least {same} tokens would be shared)" if same else ""


def _sort(text: str) -> str:
    if _NUMBERS.fullmatch(text):
        return "a number, date or time"
    if _ID.fullmatch(text):
        return "an id"
    return "a short text"


def _meet_again(mine: array[int], other: array[int], at: int) -> int | None:
    """Tokens of ``mine`` after which both go on alike for :data:`SAME` tokens."""
    for skipped in range(NEAR):
        after = mine[at + skipped : at + skipped + SAME]
        if len(after) < SAME:
            return None
        if _find(other[at : at + NEAR + SAME], after) is not None:
            return skipped
    return None


def _find(tokens: array[int], part: array[int]) -> int | None:
    data, size = tokens.tobytes(), tokens.itemsize
    place = data.find(part.tobytes())
    while place >= 0 and place % size:
        place = data.find(part.tobytes(), place + 1)
    return None if place < 0 else place // size
