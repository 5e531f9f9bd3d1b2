"""The words of prompt caching that clients of other services know: which beginnings of a prompt are to stay in the
prefix cache, and for how long after their last use.

Whatever a request says, the prefix cache finds any beginning that it has. These words are about what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.contracts.request import Retained
from engine.service.errors import bad_request
from engine.service.protocol import CacheControl, ChatOptions, CommonOptions, Message
from engine.service.translating import Mark, marks_of
from engine.service.turns import Breakpoint, Conversation, TextPart, Turn

SECONDS = {
    "5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0, "in_memory": 300.0, "in-memory": 300.0,
}  # fmt: skip
MOST = 4
"""Breakpoints of a request."""
OTHERWISE = "\x02"
"""Text that goes on like no other."""


def breakpoints_of(request: ChatOptions, messages: Sequence[Message]) -> tuple[Breakpoint, ...]:
    """In the order of the prompt. Raises :class:`ApiError` ``invalid`` for more of Anthropic's than it takes, and for a
    longer time after a shorter one; of OpenAI's the last ones count."""
    last = len(messages) - 1
    marks: list[tuple[int, Mark]] = []
    marks += [(-1, (None, tool.cache_control)) for tool in request.tools or () if tool.cache_control is not None]
    marks += [(turn, mark) for turn, message in enumerate(messages) for mark in marks_of(message)]
    if request.cache_control is not None:
        marks.append((last, (None, request.cache_control)))
    times = [words.ttl or "5m" for _, (_, words) in marks if isinstance(words, CacheControl)]
    if len(times) > MOST:
        raise bad_request(f"cache_control is given {len(times)} times; at most {MOST}.", "cache_control")
    if times != sorted(times):  # "1h" before "5m"
        raise bad_request(
            "cache_control has ttl '1h' after '5m'; expected the longer first, in the order tools, system, messages.",
            "cache_control",
        )
    options = request.prompt_cache_options
    usual = (options and options.ttl) or "30m"
    found: list[Breakpoint] = []
    explicit: list[Breakpoint] = []
    for turn, (chars, words) in marks:
        is_control = isinstance(words, CacheControl)
        seconds = SECONDS[words.ttl or ("5m" if is_control else usual)]
        (found if is_control else explicit).append(Breakpoint(turn, chars, seconds))
    whole_s = whole_prompt_s(request) or (SECONDS[usual] if explicit and options is None else 0.0)
    found += explicit[-(MOST - (whole_s > 0.0)) :]
    if whole_s:
        found.append(Breakpoint(last, None, whole_s))
    return tuple(found)


def whole_prompt_s(request: CommonOptions) -> float:
    """How long all of the prompt is to stay, by what the request says of itself, in seconds; 0: it says nothing."""
    options, retention = request.prompt_cache_options, request.prompt_cache_retention
    if options is not None and options.mode == "explicit":
        return 0.0
    asked = [] if options is None else [options.ttl or "30m"]
    return max([SECONDS[word] for word in (*asked, *filter(None, [retention]))], default=0.0)


def going_on_otherwise(conversation: Conversation, end: Breakpoint) -> Conversation:
    """Another conversation with the same beginning: what the prompts of both have in common is the beginning that does
    not depend on what follows."""
    turns = list(conversation.turns[: end.turn + 1])
    if end.chars is not None and turns and (end.chars < len(turns[-1].text) or turns[-1].tool_calls):
        turns[-1] = msgspec.structs.replace(turns[-1], content=_cut(turns[-1], end.chars), tool_calls=[])
    for turn in conversation.turns[end.turn + 1 : end.turn + 2]:
        turns.append(Turn(turn.role, OTHERWISE, turn.name, tool_call_id=turn.tool_call_id))
    return msgspec.structs.replace(conversation, turns=tuple(turns), add_generation_prompt=False, breakpoints=())


def _cut(turn: Turn, chars: int) -> str | list[TextPart]:
    if isinstance(turn.content, str):
        return turn.content[:chars] + OTHERWISE
    parts: list[TextPart] = []
    for part in turn.content:
        if chars <= 0:
            break
        parts.append(TextPart(part.text[:chars]))
        chars -= len(part.text)
    return [*parts, TextPart(OTHERWISE)]


def written(retain: Sequence[Retained], cached: int) -> dict[float, int]:
    """By time in seconds: tokens that were not in the cache before, and are to stay in it. ``cached``: tokens that
    were."""
    found: dict[float, int] = {}
    for num_tokens, seconds in sorted(retain):
        if num_tokens > cached:
            found[seconds] = found.get(seconds, 0) + num_tokens - cached
            cached = num_tokens
    return found
