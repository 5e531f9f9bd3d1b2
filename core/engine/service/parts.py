"""What an output consists of: text for the reader, reasoning, and calls of tools."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A part of an output that is text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A part that is what the model thinks before it answers. No parser makes any yet."""

    text: str


class CallText(msgspec.Struct, frozen=True):
    """A part of a tool call."""

    index: int
    """Which call of the output it is a part of, from 0."""
    arguments: str
    """A piece of the JSON of the call's arguments."""
    id: str = ""
    """The call's id, in its first part; so is ``name``."""
    name: str = ""


Part = Text | Reasoning | CallText


class PartParser(Protocol):
    """Finds the parts in the visible text of an output as it grows."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """The parts that become certain with more text."""
        ...

    def finish(self) -> tuple[Part, ...]:
        """The rest, at the end."""
        ...


def merged(parts: tuple[Part, ...] | list[Part]) -> tuple[Part, ...]:
    """The same with neighbouring pieces of text, and of one call's arguments, as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(last, Text) and isinstance(part, Text):
            found[-1] = Text(last.text + part.text)
        elif isinstance(last, CallText) and isinstance(part, CallText) and not part.id:
            found[-1] = CallText(last.index, last.arguments + part.arguments, last.id, last.name)
        else:
            found.append(part)
    return tuple(found)
