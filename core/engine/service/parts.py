"""What an output consists of: text for the reader, reasoning, and calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace


class Text(msgspec.Struct, frozen=True):
    """A part of an output that is text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A part that is what the model thinks before it answers."""

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

    @property
    def is_reasoning(self) -> bool:
        """The output thinks at the moment."""
        ...

    def feed(self, text: str) -> tuple[Part, ...]:
        """The parts that become certain with more text."""
        ...

    def finish(self) -> tuple[Part, ...]:
        """The rest, at the end."""
        ...


class HoldingParser(ABC):
    """A :class:`PartParser` that holds text which may turn out to be something else, and has an inner one, perhaps, for
    what it leaves."""

    _held: str
    _inner: PartParser | None

    def feed(self, text: str) -> tuple[Part, ...]:
        self._held += text
        return merged([*self._parts(final=False)])

    def finish(self) -> tuple[Part, ...]:
        parts = [*self._parts(final=True)]
        return merged([*parts, *(self._inner.finish() if self._inner is not None else ())])

    @abstractmethod
    def _parts(self, final: bool) -> Iterator[Part]:
        """What is certain of the held text, which it takes out; ``final``: all of it."""


def goes_on(last: Part | None, part: Part) -> bool:
    """Whether ``part`` continues ``last``: more text, or more arguments of the same call."""
    if isinstance(part, CallText):
        return isinstance(last, CallText) and not part.id
    return type(last) is type(part)


def merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same with those that continue each other as one."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and goes_on(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple([_as_one(run) for run in runs])


def _as_one(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, CallText):
        return replace(first, arguments="".join([part.arguments for part in run if isinstance(part, CallText)]))
    return replace(first, text="".join([part.text for part in run if not isinstance(part, CallText)]))


def overlap(text: str, sought: str) -> int:
    """Length of the longest end of ``text`` that begins ``sought``, and is not all of it."""
    return next((n for n in range(min(len(sought) - 1, len(text)), 0, -1) if sought.startswith(text[-n:])), 0)


def begins(text: str, at: int, sought: str) -> bool | None:
    """Whether ``sought`` stands at ``at``; ``None``: more text must tell."""
    if text.startswith(sought, at):
        return True
    return None if len(text) - at < len(sought) and sought.startswith(text[at:]) else False
