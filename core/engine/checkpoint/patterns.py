"""Regular expressions that come with a checkpoint: which of them may take for ever to match."""

from __future__ import annotations

import re

from engine.checkpoint.limits import MAX_PATTERN_CHARS, MAX_REPEATS

# Nothing here tries again, so that reading a pattern takes time by its length; a class that is not closed ends with it.
_CLASS = r"\[\^?+\]?+(?:\\.|[^\]\\])*+(?:\]|$)"
_OPENING = r"\((?:\?(?:<?[=!]|[a-zA-Z-]*+:|>|P?<\w++>))?"
_REPEAT = r"[*+?]|\{\d*+,?+\d*+\}"
_TOKEN = re.compile(rf"(?P<repeat>{_REPEAT})[?+]?|(?P<opening>{_OPENING})|{_CLASS}|\\.|.", re.DOTALL)


def why_endless(pattern: str, *, by_python: bool) -> str:
    """Why matching ``pattern`` may take for ever; empty: it does not.

    What may match the same text in several ways must not be repeated: trying all of them takes exponential time.
    ``by_python``: a choice may, too, and how many parts may be of any length is limited. Other matchers count how often
    they try again.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARS} are read (MAX_PATTERN_CHARS)"
    groups, closed, repeats = [False], False, 0  # for each open group, and the one just closed: may it match in ways?
    for token in _TOKEN.finditer(pattern):
        text, repeat = token.group(), token.group("repeat")
        if repeat is not None:
            if closed and repeat != "?":
                return "it repeats a part that may match in several ways, which may take exponential time"
            if not re.fullmatch(r"\{\d+\}", repeat):
                groups[-1] = True
                repeats += repeat != "?"
        closed = False
        if token.group("opening"):
            groups.append(False)
        elif text == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] |= closed
        elif text == "|" and by_python:
            groups[-1] = True
    if by_python and repeats > MAX_REPEATS:
        return f"it has {repeats} parts of any length, at most {MAX_REPEATS} are read (MAX_REPEATS)"
    return ""
