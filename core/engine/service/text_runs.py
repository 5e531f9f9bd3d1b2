"""Which tokens of an output are of its texts for the reader, where it also has thoughts and calls."""

from __future__ import annotations

from collections.abc import Sequence

from engine.service.parts import Part, Text


class TextRuns:
    """The text parts of an output as ranges of its visible text. Parts that follow each other are one run.

    Feed it what a parser is fed, token by token, and what that made of it: a parser may hold text back until it is
    certain what it is, and leaves out what is around thoughts and calls.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """Start, end and run, in order."""
        self._window = ""
        """Text that may still be some of the reader's."""
        self._start = 0
        """Of the window, in characters of the visible text."""
        self._run = -1
        self._in_text = False

    def add(self, text: str, parts: Sequence[Part], is_reasoning: bool) -> None:
        """``parts`` became certain with ``text``. ``is_reasoning``: the output thinks after it."""
        self._window += text
        for part in parts:
            if not isinstance(part, Text):
                self._in_text = False
                self._skip(len(self._window) - len(text))  # another text may follow in the same token
                continue
            self._run += not self._in_text
            self._in_text = True
            self._skip(max(self._window.find(part.text), 0))
            self._add_range(len(part.text))
            self._skip(len(part.text))
        if is_reasoning or not (self._in_text or not parts):
            self._skip(len(self._window))

    def run_of(self, start: int, end: int) -> int | None:
        """The first run that has a character of a token, or where the token has none the one around it. ``None``: there
        is none so far."""
        for first, last, run in self._ranges:
            if start < last and (end > first or start == end == first):
                return run
        return None

    def is_certain(self, start: int, end: int) -> bool:
        """Whether :meth:`run_of` will say the same at the end."""
        is_past = end < self._start or start < end == self._start  # one without a character is of what comes next
        return is_past or self.run_of(start, end) is not None

    def _add_range(self, length: int) -> None:
        first = self._start
        if self._ranges and self._ranges[-1][1:] == (first, self._run):
            first = self._ranges.pop()[0]
        self._ranges.append((first, self._start + length, self._run))

    def _skip(self, count: int) -> None:
        if count > 0:
            self._window = self._window[count:]
            self._start += count
