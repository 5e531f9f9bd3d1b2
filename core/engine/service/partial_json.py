"""JSON objects whose text may have been cut, as the arguments of a call are where an output met its limit."""

from __future__ import annotations

from typing import Any

import msgspec

CLOSERS = {"{": "}", "[": "]"}


def members(text: str) -> dict[str, Any]:
    """The members of a JSON object, of one that was cut those that are there: a number or a nested value as far as it
    came, a string only if it is whole. It is what clients make of the pieces of a stream. Empty for what is no object.
    """
    for complete in (text, *_completed(text)):
        try:
            found = msgspec.json.decode(complete)
        except (msgspec.DecodeError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _completed(text: str) -> tuple[str, str]:
    """The text with its brackets closed, and the same of what comes before its last, unfinished value."""
    open_brackets: list[str] = []
    cut = 0
    in_string = is_escaped = is_value = False
    for i, character in enumerate(text):
        if in_string:
            if not is_escaped and character == '"':
                in_string = False
                if is_value:
                    cut = i + 1
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in CLOSERS:
            open_brackets.append(character)
            is_value = character == "["
            cut = i + 1
        elif character in "}]" and open_brackets:
            open_brackets.pop()
            cut = i + 1
        elif character == ",":
            is_value = open_brackets[-1:] == ["["]
            cut = i
        elif character == ":":
            is_value = True
    closing = "".join([CLOSERS[bracket] for bracket in reversed(open_brackets)])
    return text + closing, text[:cut] + closing  # whatever opens or closes a bracket is a place to cut
